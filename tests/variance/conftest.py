"""Run these tests with one thread: for small matrices starting threads costs more than the work."""

from __future__ import annotations

import pytest

from covey.nodes.network import threads_for


@pytest.fixture(autouse=True, scope="package")
def _one_thread():
    with threads_for(1):
        yield
