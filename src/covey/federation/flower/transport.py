"""Encoded messages over Flower's Grid: one Flower message for each site, with the encoded message as one bytes value in it.

Sites are named by the operator, at ``flwr supernode register KEY.pub LINK --name NAME``. On a link that authenticates nobody
the nodes are asked for their names instead. Replies are matched by the message they reply to, since Flower's own error
replies do not say which node they speak of.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from covey.errors import FederationError, listing
from covey.federation.privacy.signing import public_text, sign, signed_by_operator
from covey.federation.wire.codec import printable_texts
from covey.federation.wire.transport import Failure, Transport

ASK, WHO = "train.covey", "query.covey"  # Flower's types of our messages: for the site, for its node
RECORD = "covey"  # name of our record in a Flower message

_PAUSE = 0.1  # seconds between looks for replies; Flower's own loop sleeps 3
# seconds that a message outlives the timeout, so that covey reports a late reply before Flower drops the message
_MARGIN = 10.0
_PATIENCE_FOR_NAMES = 20.0  # seconds

_AWAY = "it is not connected; start covey node there"
_NOT_COVEY = "it is not a node of covey; start covey node there"
_REASONS = {  # by Flower's code of the error
    0: "its node does not answer this message; install the same version of covey everywhere",
    1: _NOT_COVEY,
    2: _NOT_COVEY,
    3: "its node has stopped in its reply, or the message has expired; start covey node there again",
    4: "its reply has expired; give a longer --timeout",
    5: "its node has stopped; start covey node there again",
}


class FlowerTransport(Transport):
    """The sites connected to a link, reached through the Grid of a running ServerApp.

    Parameters
    ----------
    grid : flwr.serverapp.Grid
        What Flower hands to the ServerApp.
    named : bool
        Whether sites go by the names under which the operator registered their keys (the default), so that a node without
        one is an error; else nodes are asked, which is fit only for a link that authenticates nobody.
    key : EllipticCurvePrivateKey, optional
        The operator's key, with which messages are signed for sites that answer known operators only.
    """

    def __init__(self, grid: Grid, *, named: bool = True, key: EllipticCurvePrivateKey | None = None) -> None:
        self._grid, self._named, self._key = grid, named, key
        self._names: dict[int, str] = {}  # names that nodes gave themselves, by node id
        self._waiting: dict[str, tuple[str, float, float]] = {}  # by site: id of its message, deadline and time to reply
        self._failed: dict[str, Failure] = {}

    def sites(self) -> tuple[str, ...]:
        return tuple(sorted(self._nodes()))

    def push(self, messages: Mapping[str, bytes], timeout: float) -> None:
        nodes, deadline = self._nodes(), time.monotonic() + timeout
        for name, message in messages.items():
            self._waiting.pop(name, None)
            if name not in nodes:
                self._failed[name] = Failure(_AWAY)
                continue
            content = RecordDict({RECORD: ConfigRecord(self._record(name, message))})
            carried = Message(content, dst_node_id=nodes[name], message_type=ASK, ttl=timeout + _MARGIN)
            self._failed.pop(name, None)
            self._waiting[name] = self._push(carried), deadline, timeout

    def pull(self, wait: float) -> dict[str, bytes | Failure]:
        until = time.monotonic() + wait
        while True:
            came = dict[str, bytes | Failure](self._failed)
            self._failed.clear()
            sent = {each: name for name, (each, *_) in self._waiting.items() if each}
            for reply in self._grid.pull_messages([*sent]) if sent else ():
                name = sent.get(reply.metadata.reply_to_message_id)
                if name is not None:
                    came[name] = _read(reply)
            now = time.monotonic()
            for name, (each, deadline, timeout) in self._waiting.items():
                if name not in came and (not each or now >= deadline):
                    came[name] = Failure(f"it did not answer within {timeout:g} seconds")
            self._waiting = {name: each for name, each in self._waiting.items() if name not in came}
            if came or now >= until:
                return came
            time.sleep(min(_PAUSE, until - now))

    def about(self) -> dict[str, dict[str, Any]]:
        """What each node that is connected says of itself, by the name of its site."""
        nodes, found = self._nodes(), dict[str, dict[str, Any]]()
        said = self._who(nodes.values())
        for name, node in nodes.items():
            with suppress(ValueError, TypeError, KeyError, RecursionError):  # a changed node may say anything
                found[name] = {**printable_texts(json.loads(str(said[node]["about"])))}
            found[name] = {**found.get(name, {}), "node": str(node)}
        return found

    def _record(self, site: str, message: bytes) -> dict[str, Any]:
        if self._key is None:
            return {"message": message, "site": site, "operator": ""}
        signature = sign(self._key, *signed_by_operator(site, message))
        return {"message": message, "site": site, "operator": public_text(self._key), "signature": signature}

    def _nodes(self) -> dict[str, int]:
        """Node ids by site name."""
        infos = list(self._grid.get_nodes())
        if not self._named:
            here = [info.node_id for info in infos]
            said = self._who(node for node in here if node not in self._names)
            self._names |= {node: str(record["site"]) for node, record in said.items() if "site" in record}
            return _by_name({node: self._names[node] for node in here if node in self._names})
        nameless = [info.node_id for info in infos if not info.name]
        if nameless:
            why = f"Node {nameless[0]} is connected but was registered without a name"
            fix = "unregister it and register its key with --name, or give --insecure if this link has no keys"
            raise FederationError(f"{why}; {fix}.")
        return _by_name({info.node_id: info.name for info in infos})

    def _who(self, nodes: Iterable[int]) -> dict[int, ConfigRecord]:
        """What nodes say of themselves; nothing from those that do not answer in time."""
        asked = {node: Message(RecordDict(), dst_node_id=node, message_type=WHO, ttl=_PATIENCE_FOR_NAMES) for node in nodes}
        waiting = {each: node for node, message in asked.items() if (each := self._push(message))}
        found, until = dict[int, ConfigRecord](), time.monotonic() + _PATIENCE_FOR_NAMES
        while waiting and time.monotonic() < until:
            for reply in self._grid.pull_messages([*waiting]):
                node = waiting.pop(reply.metadata.reply_to_message_id, None)
                if node is not None and reply.has_content():
                    found[node] = reply.content.config_records.get(RECORD, ConfigRecord())
            time.sleep(_PAUSE if waiting else 0.0)
        return found

    def _push(self, message: Message) -> str:
        """The id of a message that was pushed; "" if the link refuses it. A push of several would be refused as a whole."""
        return next(iter(self._grid.push_messages([message])), None) or ""


def _by_name(names: Mapping[int, str]) -> dict[str, int]:
    twice = sorted({name for name in names.values() if [*names.values()].count(name) > 1})
    if twice:
        raise FederationError(f"Two connected nodes have the same name: {listing(twice)}; stop or rename one of them.")
    return {name: node for node, name in names.items()}


def _read(reply: Message) -> bytes | Failure:
    if reply.has_error():
        return Failure(_REASONS.get(reply.error.code, f"Flower reports error {reply.error.code}"))
    record = reply.content.config_records.get(RECORD, ConfigRecord())
    encoded, refusal = record.get("message"), record.get("refusal")
    if isinstance(encoded, bytes):
        return encoded
    return Failure(str(refusal or "its reply is empty; see the log at the site"))
