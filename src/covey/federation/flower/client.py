"""Flower's client app: the covey that is installed at a site answers each message from the site's own table.

Flower starts a process for every message, so the site is opened again for each. The text of an error may hold values of the
table: it goes to the node's log, and the operator learns only that there is an error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from covey.errors import CoveyError
from covey.federation.flower.transport import RECORD


def site_app(settings: Callable[[Context], Mapping[str, Any]]) -> ClientApp:
    """An app that answers for a site: ``settings`` finds its name, its table and its home in Flower's context.

    A deployed node was started with them (``app``, below); a virtual node of Flower's own simulation has only a number.

    Examples
    --------
    >>> def by_number(context):
    ...     number = context.node_config["partition-id"]
    ...     return {"site": f"site{number}", "data": f"site{number}.parquet", "home": f"homes/site{number}"}
    >>> simulated = site_app(by_number)
    """
    of_site = ClientApp()

    @of_site.train("covey")
    def answer(message: Message, context: Context) -> Message:
        record = message.content.config_records[RECORD]
        return _reply(message, _answer(str(record["site"]), record["message"], dict(settings(context))))

    @of_site.query("covey")
    def site_name(message: Message, context: Context) -> Message:
        # The name that the node was started with, for a link on which the operator registers no names.
        return _reply(message, {"site": str(settings(context).get("site", ""))})

    return of_site


app = site_app(lambda context: context.node_config)


def _answer(name: str, encoded: Any, settings: dict[str, Any]) -> dict[str, Any]:
    own = settings.pop("site", name)
    if own != name:
        return {"refusal": f"it was started as {own!r} but is registered as {name!r}; start it with --site {name}"}
    try:
        from covey.federation.site.site import open_site

        return {"message": open_site(name, settings).answer(encoded)}
    except Exception as problem:
        expected = isinstance(problem, CoveyError)
        logging.getLogger("flwr").error("covey: %s", problem, exc_info=None if expected else problem)
        what = "could not open its data" if expected else f"failed with {type(problem).__name__}"
        return {"refusal": f"it {what}; see the log at the site"}


def _reply(message: Message, values: dict[str, Any]) -> Message:
    return Message(RecordDict({RECORD: ConfigRecord(values)}), reply_to=message)
