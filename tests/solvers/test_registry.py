"""Solvers declare themselves: names without importing them, options from signatures, a new one from a single function."""

from __future__ import annotations

import inspect
import subprocess
import sys

import numpy as np
import pytest

import covey.solvers
from covey import GroupedData, InMemory, Penalty
from covey.errors import CoveyError, SolverError
from covey.losses import Bernoulli, Gaussian
from covey.solvers import minimise, registry, solve
from covey.solvers.result import Fit, begin_at
from tests.solvers.first_order.shared import quietly


@pytest.fixture
def small():
    data = GroupedData.from_arrays([[1.0], [1.0], [1.0]], [0.0, 3.0, 9.0], ["a", "b", "c"], ["x", "x", "y"])
    return data, Penalty.of(data.hierarchy)


def test_names_need_no_numba():
    code = "import sys; from covey.solvers import registry; print(registry.choices()); sys.exit('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "'sweep', 'newton', 'l2gd', 'one_coin', 'al2sgd_plus'" in done.stdout


def test_declarations_in_files_agree_with_the_register():
    for name in registry.names():
        declared = registry.find(name)
        assert declared.name == name == declared.run.__name__
        assert getattr(covey.solvers, name) is declared.run
        assert (name in registry.first_order()) is declared.first_order is not (name in registry.direct())
        assert list(inspect.signature(declared.run).parameters)[:2] == ["network", "penalty"]
        assert not set(declared.options) & set(registry.COMMON)
    assert registry.find("l2gd").options["steps"] == "constant"
    assert set(registry.find("newton").options) == {"checkpoint"}
    assert registry.find("sweep").options == {}


def test_functions_do_not_hide_their_modules():
    from covey.solvers.direct import newton
    from covey.solvers.first_order import l2gd

    assert inspect.ismodule(newton)
    assert inspect.ismodule(l2gd)
    with pytest.raises(AttributeError):
        covey.solvers.frobnicate  # noqa: B018


def test_a_new_solver_is_one_function(small, monkeypatch):
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))

    @registry.algorithm(place=9, quadratic=True)
    def lazy(network, penalty, *, start=None, patience=1, tol=1e-8):
        begin_at(network, start)
        best = minimise(network.node.data, network.loss, penalty)
        return Fit(network.node.coefficients() + patience, best.w, best.wbar, best.convergence)

    data, penalty = small
    assert registry.names()[-1] == "lazy"
    assert minimise(data, Gaussian(), penalty, solver="lazy", patience=3).theta.tolist() == [[3.0]] * 3
    assert minimise(data, Gaussian(), penalty, solver="lazy", start=np.ones((3, 1))).theta.tolist() == [[2.0]] * 3
    with pytest.raises(SolverError, match=r"'lazy' has no option 'patients'; did you mean 'patience'"):
        minimise(data, Gaussian(), penalty, solver="lazy", patients=3)


def test_auto_is_the_first_direct_solver_that_fits(small):
    data, penalty = small
    assert minimise(data, Gaussian(), penalty).convergence.solver == "sweep"
    yes = GroupedData.from_arrays([[1.0]] * 4, [0, 1, 1, 0], ["a", "a", "b", "b"])
    assert minimise(yes, Bernoulli(), Penalty.of(yes.hierarchy)).convergence.solver == "newton"


@quietly
def test_a_network_in_memory_gives_what_data_gives(small):
    data, penalty = small
    for solver in registry.names():
        given = {"solver": solver, "tol": 1e-3, "max_iter": 5000}
        network = InMemory.of(data, Gaussian(), penalty.gamma)
        one, two = solve(network, penalty, **given), minimise(data, Gaussian(), penalty, **given)
        np.testing.assert_array_equal(one.theta, two.theta)
        np.testing.assert_array_equal(one.theta, network.node.coefficients())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"solver": "sgd"}, r"'solver' parameter must be one of 'auto', 'sweep', .*Got 'sgd'"),
        ({"solver": "l2gd", "options": {"tol": 1}}, r"'tol' is not an option"),
        ({"options": {"eta": 1}}, r"The solver 'auto' has no option 'eta'; it takes no options"),
        ({"solver": "l2gd", "options": 3}, r"'options' parameter must map names to values. Got 3"),
        ({"solver": "one_coin", "james_stein": True}, r"james_stein=True needs the curvature, which 'one_coin'"),
    ],
)
def test_mistakes(small, given, message):
    data, penalty = small
    with pytest.raises(CoveyError, match=message):
        minimise(data, Gaussian(), penalty, **given)
