"""How Flower's programs are started, without starting them."""

from __future__ import annotations

import os
import signal
import threading
import time

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
