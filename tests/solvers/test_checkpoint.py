"""A run on disk: killed, resumed and taken further to the same bits; good for its own problem only."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from covey import Penalty
from covey.datasets import simulate
from covey.errors import SolverError
from covey.losses import Gaussian, loss_of
from covey.records import decode
from covey.solvers import minimise
from tests.solvers.first_order.shared import (
    SOLVERS,
    many_clients,
    quietly,
)


def kept(path):
    return decode(path.read_bytes()).progress.iteration


KILLED = """
import sys
from covey import Penalty
from covey.solvers import minimise
from covey.datasets import simulate
from covey.losses import Bernoulli
data = simulate("bernoulli", clusters=3, clients=40, rows=5, d=3, seed=1).data
penalty = Penalty.of(data.hierarchy, gamma=2.0, lam=2.0)
minimise(data, Bernoulli(), penalty, solver=sys.argv[1], seed=5, tol=0.0, max_iter=10_000_000, checkpoint=sys.argv[2])
"""


@quietly
@pytest.mark.parametrize("solver", SOLVERS)
def test_a_killed_run_resumes_to_the_same_bits(solver, tmp_path):
    """Killed wherever it is, with checks as theory spaces them, then taken further than it was asked to go at first."""
    path = tmp_path / "run.npz"
    with subprocess.Popen([sys.executable, "-W", "ignore", "-c", KILLED, solver, str(path)]) as process:
        for _ in range(1800):
            time.sleep(0.1)
            if path.exists() and kept(path) >= 300:
                break
        process.kill()
    reached = kept(path)
    assert reached >= 300
    data = simulate("bernoulli", clusters=3, clients=40, rows=5, d=3, seed=1).data
    penalty = Penalty.of(data.hierarchy, gamma=2.0, lam=2.0)
    settings = {"seed": 5, "tol": 0.0, "max_iter": reached + 250}
    straight = minimise(data, loss_of("bernoulli"), penalty, solver=solver, **settings)
    resumed = minimise(data, loss_of("bernoulli"), penalty, solver=solver, checkpoint=path, **settings)
    np.testing.assert_array_equal(resumed.theta, straight.theta)
    np.testing.assert_array_equal(resumed.wbar, straight.wbar)
    assert resumed.history.equals(straight.history)
    np.testing.assert_array_equal(resumed.ledger.within, straight.ledger.within)


@quietly
@pytest.mark.parametrize("solver", SOLVERS)
def test_raising_max_iter_goes_on_to_the_same_bits(solver, tmp_path):
    """Stopped at an iteration where no check was due, then taken further: as if it had never stopped."""
    data, penalty = many_clients("gaussian")
    path = tmp_path / "run.npz"
    for spacing in ({}, {"every": 40}):
        minimise(data, Gaussian(), penalty, solver=solver, max_iter=137, tol=0.0, checkpoint=path, **spacing)
        resumed = minimise(data, Gaussian(), penalty, solver=solver, max_iter=400, tol=0.0, checkpoint=path, **spacing)
        straight = minimise(data, Gaussian(), penalty, solver=solver, max_iter=400, tol=0.0, **spacing)
        np.testing.assert_array_equal(resumed.theta, straight.theta)
        assert resumed.history.equals(straight.history)
        path.unlink()


@quietly
def test_a_checkpoint_belongs_to_its_run(tmp_path):
    data, penalty = many_clients("gaussian")
    path = tmp_path / "run.npz"

    def run(**changes):
        return minimise(
            data, Gaussian(), penalty, solver="l2gd", **{"max_iter": 100, "tol": 0.0, "seed": 1, "checkpoint": path, **changes}
        )

    run()
    for changes, message in (
        ({"seed": 2}, "other seed"),
        ({"eta": 1e-4}, "other eta"),
        ({"steps": "switching"}, "other steps"),
        ({"p0": 0.3, "eta": 1e-3}, "other eta"),
        ({"vote": "majority"}, "other vote"),
        ({"every": 7}, "other every"),
        ({"start": np.ones((1200, 3))}, "other start"),
    ):
        with pytest.raises(SolverError, match=rf"is of another run \({message}\); give another path"):
            run(**changes)
    fixed = {"p0": 0.2, "p": 0.2, "eta": 1e-4, "mu": 0.1, "L": 90.0, "max_iter": 100, "tol": 0.0, "checkpoint": path}
    path.unlink()
    minimise(data, Gaussian(), penalty, solver="l2gd", **fixed)
    other = replace(data, hierarchy=replace(data.hierarchy, cluster_ptr=np.array([0, 100, 800, 1200])))
    for changed, loss, ties, message in (
        (data, Gaussian(), Penalty.of(data.hierarchy, gamma=2.0, lam=2.5), "other penalties"),
        (data, Gaussian("mean"), penalty, "other loss"),
        (data, Gaussian(ridge=0.1), penalty, "other loss"),
        (replace(data, y=(data.y > 0) * 1.0), loss_of("bernoulli"), penalty, "other loss"),
        (other, Gaussian(), penalty, "other data"),
        (replace(data, weights=np.full(data.n_rows, 0.5)), Gaussian(), penalty, "other data"),
    ):
        with pytest.raises(SolverError, match=message):
            minimise(changed, loss, ties, solver="l2gd", **fixed)
    for damage in (b"nothing", b"", path.read_bytes()[:500]):
        path.write_bytes(damage)
        with pytest.raises(SolverError, match="cannot be read; delete it to start anew"):
            run()
    with pytest.raises(SolverError, match="must be a file in a folder that exists"):
        run(checkpoint=tmp_path / "nowhere" / "run.npz")
