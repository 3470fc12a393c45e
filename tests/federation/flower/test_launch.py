"""How Flower's programs are started, without starting them."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from covey.federation.flower import launch, node

pytest.importorskip("flwr")


def test_files_of_the_link_are_private(tmp_path, monkeypatch):
    """Its database holds messages, and so sums of sites."""
    before = os.umask(0o022)
    try:
        monkeypatch.setattr(os, "execve", lambda *_: (tmp_path / "link.db").write_text("sums"))
        launch.start_link(database=tmp_path / "link.db", insecure=True)
    finally:
        os.umask(before)
    assert (tmp_path / "link.db").stat().st_mode & 0o777 == 0o600


def test_a_signal_ends_the_wait_of_a_node_without_a_lock():
    """A handler that takes a lock can wait for the thread that it interrupts, which is its own."""
    stop, before = node._Stop(), time.monotonic()
    old = signal.signal(signal.SIGTERM, stop.ask)
    try:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        stop.wait(20.0)
    finally:
        signal.signal(signal.SIGTERM, old)
    assert stop.asked
    assert time.monotonic() - before < 10
    assert not [each for each in vars(stop).values() if hasattr(each, "acquire") or hasattr(each, "wait")]


def test_an_outcome_arrives_in_the_log_if_its_file_cannot_be_written(tmp_path, capsys):
    """A link that runs as a service has its own folder for temporary files, and another user."""
    from covey.federation.flower import server

    server._leave(str(tmp_path / "hidden" / "report.json"), {"text": "two lines\nof a result"})
    log = launch._RunLog()
    for line in ["Successfully started run 7", *capsys.readouterr().out.splitlines()]:
        log.read_line(line)
    assert (log.run, log.left) == ("7", {"text": "two lines\nof a result"})
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ('{"minimum": 7, "node": "3", "covey": "\\u001b[2J1"}', {"minimum": 7, "covey": "?[2J1"}),
        ("{", {}),
        ("[1]", {}),
        ("[" * 100_000, {}),
    ],
)
def test_a_changed_node_cannot_harm_who_asks_for_its_status(said, shown, monkeypatch):
    """Whatever it says of itself, there is no control character, no error and no other number of its node."""
    from flwr.app import ConfigRecord, RecordDict
    from flwr.supercore.task_identity import TaskIdentity

    from covey.federation.flower.transport import RECORD, FlowerTransport

    class Grid:
        def get_nodes(self):
            return [SimpleNamespace(node_id=1, name="north"), SimpleNamespace(node_id=2, name="south")]

        def push_messages(self, messages):
            return [f"to {message.metadata.dst_node_id}" for message in messages]

        def pull_messages(self, ids):
            answers = {"to 1": RecordDict({RECORD: ConfigRecord({"site": "north", "about": said})}), "to 2": None}
            return [Reply(SimpleNamespace(reply_to_message_id=each), answers[each]) for each in ids]

    @dataclass
    class Reply:
        metadata: object
        content: object

        def has_content(self):
            return self.content is not None

    for name in ("task", "run", "node"):
        monkeypatch.setattr(TaskIdentity, f"_{name}_id", 1)
    assert FlowerTransport(Grid()).about() == {"north": {**shown, "node": "1"}, "south": {"node": "2"}}
