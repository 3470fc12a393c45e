"""How Flower's programs are started, without starting them."""

from __future__ import annotations

import os

import pytest

from covey.federation.flower import launch

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
