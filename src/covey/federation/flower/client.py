"""The app at a site: each letter is answered by the site's own covey, from its own table and its own disk.

Flower starts a process for every message, so the site is opened anew for each. What goes wrong here stays here, in the node's
log: the words of an error may hold values of the table, and the operator is told only that there is one.
"""

from __future__ import annotations

import logging
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from covey.errors import CoveyError
from covey.federation.flower.transport import RECORD

app = ClientApp()


@app.train("covey")
def answer(message: Message, context: Context) -> Message:
    """Answer a letter."""
    record = message.content.config_records[RECORD]
    return _reply(message, _answer(str(record["site"]), record["letter"], dict(context.node_config)))


@app.query("covey")
def who(message: Message, context: Context) -> Message:
    """Tell the name that this node was started with, on a link where the operator names nobody."""
    return _reply(message, {"site": str(context.node_config.get("site", ""))})


def _answer(name: str, letter: Any, settings: dict[str, Any]) -> dict[str, Any]:
    own = settings.pop("site", name)
    if own != name:
        return {"refusal": f"it was started as {own!r} but is registered as {name!r}; start it with --site {name}"}
    try:
        from covey.federation.site import open_site

        return {"letter": open_site(name, settings).answer(letter)}
    except Exception as problem:
        expected = isinstance(problem, CoveyError)
        logging.getLogger("flwr").error("covey: %s", problem, exc_info=None if expected else problem)
        what = "could not open its data" if expected else f"broke on {type(problem).__name__}"
        return {"refusal": f"it {what}; see the log at the site"}


def _reply(message: Message, values: dict[str, Any]) -> Message:
    return Message(RecordDict({RECORD: ConfigRecord(values)}), reply_to=message)
