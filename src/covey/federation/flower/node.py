"""The node of a site: one process that asks the link for messages and answers those of covey, with its own code only.

A run of Flower carries an app bundle, which a stock SuperNode downloads, unpacks and executes. This node speaks the same fleet
protocol under the same TLS and node keys, and leaves that out: it never asks for the bundle of a run. A message that is not one
of covey's gets an error as its reply, and its content is not even fetched.

The table and the state of the runs stay in memory between messages, and on the site's disk for a restart. When the link goes
away, the node calls again until it is back. SIGTERM ends it after the message that it is answering.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
    UnregisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree, PullObjectRequest, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from covey.errors import FederationError
from covey.federation.flower.transport import ASK, RECORD, WHO

Answer = Callable[[str, Mapping[str, Any]], Mapping[str, Any] | None]
"""From the type and the record of a message to the record of the reply; None refuses the message."""

POLL, _IDLE, _IDLE_AFTER = 0.1, 1.0, 30.0  # seconds between looks for messages; fewer looks some time after the last message
_AGAIN = 5.0  # seconds before the node calls a link again that does not answer
_OBJECTS = 8  # the most parts of a message; those of covey have three
_TRIES = 20  # how often a part is asked for that is still on its way to the link


@dataclass(frozen=True)
class Link:
    """Where the link is, and how to reach it: its certificate and the private key of the site, or neither of them."""

    address: str
    certificate: Path | None = None
    key: ec.EllipticCurvePrivateKey | None = None


class _Stop:
    """Whether a signal asked the node to end.

    Python runs a signal's handler between two steps of the main thread, which may hold the lock of a ``threading.Event`` at
    that moment and would then wait for itself. So the handler only assigns an attribute, at which :meth:`wait` looks.
    """

    asked = False

    def ask(self, *_: object) -> None:
        self.asked = True

    def wait(self, seconds: float) -> None:
        """Sleep this long, or until the node is asked to end."""
        until = time.monotonic() + seconds
        while not self.asked and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, POLL))


def serve(link: Link, answer: Answer) -> None:
    """Answer messages of the link until SIGTERM or SIGINT."""
    stop = _Stop()
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, stop.ask)
    while not stop.asked:
        try:
            with _connected(link, stop) as fleet:
                say(f"connected to {link.address}")
                last = 0.0
                while fleet.alive and not stop.asked:
                    if fleet.answer_next(answer):
                        last = time.monotonic()
                    else:
                        stop.wait(POLL if time.monotonic() < last + _IDLE_AFTER else _IDLE)
        except httpx.HTTPError as problem:
            say(f"{_reason(link, problem)}; trying again every {_AGAIN:g} seconds")
        stop.wait(_AGAIN)
    say("stopped")


def say(what: str) -> None:
    """One line for the log of the node."""
    print(f"{datetime.now(UTC).isoformat(timespec='seconds')} covey: {what}", file=sys.stderr, flush=True)


class _Fleet:
    """One connection to the link, as one node."""

    def __init__(self, client: FleetHttpClient, node: Node, stop: _Stop) -> None:
        self._client, self._node, self._stop = client, node, stop
        self.alive = True

    def answer_next(self, answer: Answer) -> bool:
        """Answer one message, if there is one."""
        came = self._call(self._client.PullMessages, PullMessagesRequest(node=self._node))
        if not came.messages_list:
            return False
        message, tree = message_from_proto(came.messages_list[0]), came.message_object_trees[0]
        try:
            self._send(_reply(message, answer, lambda: self._content(message, tree)))
        except httpx.HTTPStatusError as problem:
            if problem.response.status_code != httpx.codes.FORBIDDEN:
                raise
            say("the run ended before this reply")
        return True

    def heartbeat(self) -> bool:
        """Tell the link that this node is there; a link that does not know it any more gets a new connection."""
        try:
            request = SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
            self.alive = self._client.SendNodeHeartbeat(request).success
        except httpx.TransportError:
            return False  # asks for another try soon
        except httpx.HTTPStatusError as problem:
            self.alive = problem.response.is_server_error
        return True

    def _call(self, method: Callable[[Any], Any], request: Any) -> Any:
        """Call the link; while it is away, again and again, since after a restart it still knows this node."""
        away = False
        while True:
            try:
                found = method(request)
            except httpx.TransportError as problem:
                if self._stop.asked:
                    raise
                if not away:
                    say(f"no connection to the link ({type(problem).__name__}); trying again")
            except httpx.HTTPStatusError as problem:
                if problem.response.status_code not in (502, 503, 504) or self._stop.asked:
                    raise
            else:
                if away:
                    say("the link is back")
                return found
            away = True
            self._stop.wait(1.0)

    def _content(self, message: Message, tree: ObjectTree) -> Message:
        """Fetch the parts of a message."""
        ids, run = [part.object_id for part in iterate_object_tree(tree)], message.metadata.run_id
        if len(ids) > _OBJECTS:
            raise ValueError("too many parts")
        parts = {}
        for each in ids:
            for _ in range(_TRIES):
                found = self._call(self._client.PullObject, PullObjectRequest(node=self._node, run_id=run, object_id=each))
                if found.object_available:
                    break
                time.sleep(POLL)
            parts[each] = found.object_content
        confirm = ConfirmMessageReceivedRequest(node=self._node, run_id=run, message_object_id=tree.object_id)
        self._call(self._client.ConfirmMessageReceived, confirm)
        whole = inflate_object_from_contents(tree.object_id, parts)
        if not isinstance(whole, Message):
            raise TypeError("not a message")
        return whole

    def _send(self, reply: Message) -> None:
        run, parts = reply.metadata.run_id, get_all_nested_objects(reply)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        bare = remove_content_from_message(reply) if reply.has_content() else reply
        request = PushMessagesRequest(
            node=self._node, messages_list=[message_to_proto(bare)], message_object_trees=[get_object_tree(reply)]
        )
        wanted = self._call(self._client.PushMessages, request)
        place = {"node": self._node, "run_id": run, "session_id": wanted.session_id}
        for each in wanted.objects_to_push:
            part = PushObjectRequest(object_id=each, object_content=parts[each].deflate(), **place)
            self._call(self._client.PushObject, part)


def _reply(message: Message, answer: Answer, content: Callable[[], Message]) -> Message:
    """The reply to a message; an error, if it is not one of covey's."""
    kind, record, values = message.metadata.message_type, dict[str, Any](), None
    if kind in (ASK, WHO):
        # Whatever an app puts into its message, the node goes on.
        with suppress(ValueError, TypeError, KeyError, AttributeError):
            record = dict(content().content.config_records.get(RECORD, {}))
    values = answer(kind, record)
    if values is None:
        return Message(Error(0, "This node answers messages of covey only."), reply_to=message)
    return Message(RecordDict({RECORD: ConfigRecord(dict(values))}), reply_to=message)


@contextmanager
def _connected(link: Link, stop: _Stop) -> Iterator[_Fleet]:
    """Sign in at the link, send heartbeats beside the work, and sign out at the end."""
    private, public = generate_key_pairs() if link.key is None else (link.key, link.key.public_key())
    public_bytes, plain = public_key_to_bytes(public), link.certificate is None
    certificate = None if link.certificate is None else link.certificate.read_bytes()
    signed = (RuntimeVersionHttpInterceptor(component_name="SuperNode"), NodeAuthHttpInterceptor(private, public))
    with FleetHttpClient.from_server_address(link.address, plain, certificate, signed) as client:
        if link.key is None:  # a trial without keys: everybody may register
            client.RegisterNode(RegisterNodeFleetRequest(public_key=public_bytes))
        request = ActivateNodeRequest(public_key=public_bytes, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
        node = Node(node_id=client.ActivateNode(request).node_id)
        fleet = _Fleet(client, node, stop)
        heart = HeartbeatSender(fleet.heartbeat)
        heart.start()
        try:
            yield fleet
        finally:
            if heart.is_running:
                heart.stop()
            with suppress(httpx.HTTPError):
                client.DeactivateNode(DeactivateNodeRequest(node_id=node.node_id))
                if link.key is None:
                    client.UnregisterNode(UnregisterNodeFleetRequest(node_id=node.node_id))


def _reason(link: Link, problem: httpx.HTTPError) -> str:
    """Why there is no connection, in a clause; a mistake that trying again does not cure is raised."""
    if isinstance(problem, httpx.HTTPStatusError):
        response = problem.response
        if response.status_code == httpx.codes.UNAUTHORIZED:
            skew = _clock_skew(response)
            why = f"The link {link.address} does not accept the key of this node"
            clock = f"set the clock, which differs from the link's by {skew:+.0f} seconds"
            fix = clock if abs(skew) > 3 else "send its public half (.pub) to the operator, who registers it"
            raise FederationError(f"{why}; {fix}.") from None
        if "activate" in str(response.url):
            return "the link does not know the key of this node, or still holds its last connection for up to a minute"
        return f"the link answers with the error {response.status_code}"
    if "CERTIFICATE_VERIFY_FAILED" in str(problem):
        why = f"{str(link.certificate)!r} does not confirm the certificate of the link {link.address}"
        fix = "get that file from the operator again, and use a host name that the certificate lists"
        raise FederationError(f"{why}; {fix}.") from None
    return f"no connection to the link {link.address}"


def _clock_skew(response: httpx.Response) -> float:
    """Seconds by which this machine's clock is ahead of the link's."""
    try:
        there = parsedate_to_datetime(response.headers["date"])
    except (KeyError, ValueError):
        return 0.0
    return (datetime.now(UTC) - there).total_seconds()
