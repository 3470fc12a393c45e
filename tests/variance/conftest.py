"""Run these tests with one thread: for small matrices starting threads costs more than the work."""

from __future__ import annotations

import pytest

from covey.threads import use_threads


@pytest.fixture(autouse=True, scope="package")
def _one_thread():
    with use_threads(1):
        yield
