"""Threads: every block once, the same bits for any number, no help for tiny work or on a busy machine."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from threadpoolctl import threadpool_info

from covey import HierarchicalClassifier, HierarchicalRegressor, threads
from covey.datasets import simulate
from covey.errors import CoveyError
from covey.threads import most_threads, one_blas_thread, share, use_threads


def note(begin, end, seconds, seen):
    time.sleep(seconds * (end - begin))
    seen.extend((at, threading.current_thread().name) for at in range(begin, end))


def blocks_and_threads(blocks, seconds):
    seen = []
    share(note, blocks, seconds, seen)
    return sorted(at for at, _ in seen), {name for _, name in seen}


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("blocks", [0, 1, 2, 31, 32, 33, 100])
def test_every_block_is_computed_once(count, blocks, always_share):
    with use_threads(count):
        assert blocks_and_threads(blocks, 1e-5)[0] == list(range(blocks))


def test_work_that_takes_time_is_shared_and_tiny_work_is_not(monkeypatch):
    with use_threads(3):
        assert len(blocks_and_threads(64, 1e-3)[1]) == 3
    with use_threads(1):
        assert len(blocks_and_threads(64, 1e-3)[1]) == 1
    monkeypatch.setattr(threads, "WORTH_SHARING", 10.0)  # seconds; the work takes less even on a busy machine
    with use_threads(3):
        assert blocks_and_threads(64, 1e-3)[1] == {threading.current_thread().name}


def test_a_mistake_in_any_thread_is_raised(always_share):
    def fail(begin, end):
        time.sleep(1e-3)
        if end == 64:
            raise ZeroDivisionError

    with use_threads(3), pytest.raises(ZeroDivisionError):
        share(fail, 64)


def test_after_an_interrupt_of_the_caller_no_thread_writes_any_more(always_share):
    caller, written = threading.current_thread(), []

    def interrupted(begin, end):
        if threading.current_thread() is caller and begin > 10:
            raise KeyboardInterrupt
        time.sleep(2e-3)
        written.append(begin)

    with use_threads(3):
        with pytest.raises(KeyboardInterrupt):
            share(interrupted, 400)
        count = len(written)
        time.sleep(0.05)
    assert len(written) == count < 100


def test_shared_work_may_share_work_itself(always_share):
    seen = []

    def outer(begin, end):
        for _ in range(begin, end):
            share(note, 4, 1e-4, seen)

    with use_threads(4):
        share(outer, 40)
    assert len(seen) == 160


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own(always_share):
    with use_threads(3):
        assert len(blocks_and_threads(64, 1e-3)[1]) == 3
        child = os.fork()
        if child == 0:
            done = blocks_and_threads(64, 1e-3)
            os._exit(0 if done[0] == list(range(64)) and len(done[1]) == 3 else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_the_number_of_threads(monkeypatch):
    monkeypatch.setenv("COVEY_THREADS", "5")
    assert most_threads() == 5
    with use_threads(2):
        assert most_threads() == 2
        with use_threads(None):
            assert most_threads() == 2
    monkeypatch.delenv("COVEY_THREADS")
    assert 1 <= most_threads() <= len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else True
    for wrong in ("0", "many", "-1"):
        monkeypatch.setenv("COVEY_THREADS", wrong)
        with pytest.raises(CoveyError, match=rf"COVEY_THREADS.*'{wrong}'"):
            most_threads()


@pytest.mark.parametrize(("running", "free"), [(1, 4), (2, 3), (4, 1), (9, 1)])
def test_a_busy_machine_gets_fewer_threads(running, free, monkeypatch):
    """The caller is one of the threads that run."""
    monkeypatch.delenv("COVEY_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(Path, "read_text", lambda self: f"0.10 0.20 0.30 {running}/200 77\n")
    assert threads._free(4) == free
    with use_threads(4):
        assert threads._free(4) == 4


def test_the_limit_of_a_container(tmp_path):
    assert threads._container_limit(tmp_path) > 1000
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert threads._container_limit(tmp_path) > 1000
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert threads._container_limit(tmp_path) == 2
    (tmp_path / "cpu.max").unlink()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("300000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert threads._container_limit(tmp_path) == 3


@pytest.mark.parametrize("family", ["gaussian", "bernoulli"])
def test_learned_penalties_have_the_same_bits_on_any_number_of_threads(family, always_share):
    drawn = simulate(family, clusters=3, clients=700, rows=5, d=2, client_sd=0.5, equal_rows=False, seed=4)
    kind = HierarchicalRegressor if family == "gaussian" else HierarchicalClassifier
    model = kind(formula=None, fit_intercept=False, tests=False)
    fits = []
    for count in (1, 2, 5):
        with use_threads(count):
            fits.append(model.fit(drawn.X, drawn.y, client=drawn.client, cluster=drawn.cluster).model_)
    for other in fits[1:]:
        np.testing.assert_array_equal(other.theta, fits[0].theta)
        np.testing.assert_array_equal(other.wbar, fits[0].wbar)
        assert other.learned.components.log_likelihood == fits[0].learned.components.log_likelihood


def test_the_parameter_of_the_estimators():
    rows, y, client = [[0.0], [1.0], [2.0], [3.0]], [1.0, 3.0, 2.0, 4.0], ["a", "a", "b", "b"]
    with pytest.raises(CoveyError, match=r"threads.*0"):
        HierarchicalRegressor(gamma=1.0, threads=0).fit(rows, y, client=client)
    one, two = (HierarchicalRegressor(gamma=1.0, threads=count).fit(rows, y, client=client).coef_ for count in (1, 2))
    np.testing.assert_array_equal(one, two)


def test_blas_has_one_thread_inside_and_as_many_as_before_outside():
    def counts():
        return [each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"]

    before = counts()
    with one_blas_thread():
        assert set(counts()) == {1}
    assert counts() == before
