"""The plan: a run costs at most what the plan says; the cheapest solver is marked."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from covey import GroupedData, Objective, Penalty, plan
from covey.datasets import simulate
from covey.errors import CoveyError, SolverError
from covey.fitting.planning import race
from covey.losses import Gaussian, loss_of
from covey.problem.problem import Spec, resolve
from covey.solvers import minimise
from covey.solvers.clock import Speeds
from covey.solvers.costs import costs

SOLVERS = ["newton", "l2gd", "one_coin", "al2sgd_plus", "apgd", "proxskip"]


def problem(family="gaussian", **changes):
    settings = {"clusters": 3, "clients": 6, "rows": 20, "d": 2, "cluster_sd": 0.4, "client_sd": 0.3, "seed": 4, **changes}
    return simulate(family, **settings).data


@pytest.mark.parametrize("family", ["gaussian", "bernoulli", "poisson"])
def test_a_run_needs_no_more_than_the_plan_says(family):
    data = problem(family)
    found = plan(data, family=family, gamma=3.0, accuracy=1e-6)
    assert found.frame["solver"].to_list() == (["sweep", *SOLVERS] if family == "gaussian" else SOLVERS)
    assert found.cheapest == min(found.costs, key=lambda cost: cost.seconds).solver
    promised = {cost.solver: cost for cost in found.costs}
    loss, penalty = loss_of(family), Penalty.of(data.hierarchy, gamma=3.0)
    best = minimise(data, loss, penalty, solver="newton")
    assert promised["newton"].within == best.convergence.exchanges == best.ledger.between
    assert promised["newton"].bytes == best.ledger.bytes
    for solver in ("apgd", "proxskip"):
        T = int(promised[solver].iterations)
        with pytest.warns(UserWarning, match="raise max_iter"):
            fit = minimise(data, loss, penalty, solver=solver, max_iter=T, tol=0.0)
        assert ((fit.theta - best.theta) ** 2).sum() <= 1e-6 * (best.theta**2).sum()
    T, far, spent = int(promised["al2sgd_plus"].iterations), [], []
    for seed in range(3):
        with pytest.warns(UserWarning, match="raise max_iter"):
            fit = minimise(data, loss, penalty, solver="al2sgd_plus", max_iter=T, every=T, tol=0.0, seed=seed)
        far.append(((fit.theta - best.theta) ** 2).sum() / (best.theta**2).sum())
        spent.append(fit.ledger)
    assert np.mean(far) <= 1e-6
    checks = spent[0].checks  # the plan counts the default number of checks; this run made only two
    for seen, expected in (
        ([ledger.between for ledger in spent], promised["al2sgd_plus"].between),
        ([ledger.within.mean() for ledger in spent], promised["al2sgd_plus"].within),
    ):
        assert np.mean(seen) + checks <= expected + 4 * np.sqrt(expected / 3)


def test_time_follows_from_latency():
    data = problem()
    slow, fast = (plan(data, latency=latency, bandwidth=1e9, rows_per_second=1e12) for latency in (1.0, 0.001))
    for one, other in zip(slow.costs, fast.costs, strict=True):
        assert one.seconds == pytest.approx(1000 * other.seconds, rel=1e-3)
        assert other.seconds <= other.rounds * (1 + 1e-9)
        if one.within == one.between:  # every exchange is one of all clusters
            assert one.lock_step == pytest.approx(one.rounds) == pytest.approx(one.seconds)
            drawn = (
                0.03 if one.solver in ("one_coin", "proxskip") else 0.0
            )  # time is that of drawn choices, not of expected ones
            assert one.seconds == pytest.approx(2 * (one.within + one.between), rel=1e-3 + drawn)


def test_the_plan_prints_and_marks_the_cheapest():
    text = str(plan(problem(), gamma=3.0))
    assert "18 clients in 3 clusters, 2 coefficients each" in text
    assert "\n* sweep " in text
    assert text.count("* ") == 2  # the mark and its explanation
    assert "bound of its theorem" in text


def test_solvers_that_do_not_fit_say_why():
    X = np.ones((8, 2))  # two equal columns
    data = GroupedData.from_arrays(X, np.arange(8.0), np.repeat([0, 1], 4))
    found = plan(data, gamma=1.0)
    assert [math.isinf(cost.seconds) for cost in found.costs] == [False, False, True, True, True, True, True]
    assert "no estimate: No rate is known for this problem: in some direction it is flat" in str(found)


def test_a_plan_for_responses_of_zero_and_for_equal_columns():
    data = problem()
    assert plan(replace(data, y=np.zeros(data.n_rows)), gamma=1.0).cheapest in ("sweep", "apgd")  # one exchange each
    histories = race(GroupedData.from_arrays(np.ones((8, 2)), np.arange(8.0), np.repeat([0, 1], 4)), resolve(Spec(gamma=1.0)))
    assert list(histories) == ["sweep", "newton", "apgd"]  # the others do not fit, and are left out


def test_a_frame_is_read_as_the_estimators_read_it(homes):
    found = plan(homes, formula="log_radon ~ floor", client="county", cluster="state", gamma=10.0)
    assert "470 clients in 9 clusters" in found.shape
    with pytest.raises(CoveyError, match="There is no column 'county2'; did you mean 'county'"):
        plan(homes, formula="log_radon ~ floor", client="county2")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"accuracy": 0}, r"The 'accuracy' parameter must be a number > 0\. Got 0 instead"),
        ({"accuracy": 2}, "'accuracy' parameter must be a number below 1"),
        ({"latency": -1}, "'latency' parameter must be a number >= 0"),
        ({"bandwidth": 0}, "'bandwidth' parameter must be a number > 0"),
        ({"solver": "l2gd"}, "The plan has no setting 'solver' here; it takes 'gamma', 'lam'"),
        ({"formula": "y ~ x"}, "The plan has no setting 'formula' here"),
        ({"family": "poisson"}, "the poisson family takes counts >= 0"),
        ({"family": "weibull"}, "'family' parameter must be one of"),
    ],
)
def test_impossible_networks(given, message):
    with pytest.raises(CoveyError, match=message):
        plan(problem(), **given)


def test_auto_is_the_direct_solver_and_the_plan_marks_the_shortest_time():
    small = problem()
    assert minimise(small, Gaussian(), Penalty.of(small.hierarchy)).convergence.solver == "sweep"
    wide = problem("bernoulli", d=400, clusters=2, clients=3, rows=30)
    penalty, loss = Penalty.of(wide.hierarchy, gamma=5.0), loss_of("bernoulli", "mean", 10.0)
    best = minimise(wide, loss, penalty, tol=1e-3)
    assert best.convergence.solver == "newton"
    # Many coefficients on a slow line: d x d messages take longer than many exchanges of vectors.
    line = Speeds.of(wide.hierarchy, latency=0.0, bandwidth=1.0, rows_per_second=1e12)
    found = costs(Objective(wide, loss, penalty), [best], accuracy=1e-3, speeds=line)[0]
    assert min(found, key=lambda cost: cost.seconds).solver == "apgd"


def test_the_race_is_measured():
    data = problem("bernoulli")
    histories = race(data, resolve(Spec(family="bernoulli", gamma=3.0)), accuracy=1e-5, max_iter=3000)
    assert list(histories) == ["newton", "l2gd", "l2gd switching", "one_coin", "al2sgd_plus", "apgd", "proxskip"]
    for history in histories.values():
        assert history["gap"][0] == pytest.approx(1.0)
        assert history["exchanges"].is_sorted()
    assert histories["newton"]["gap"][-1] < 1e-12
    assert histories["al2sgd_plus"].filter(pl.col("gap") <= 1e-5).height > 0


def test_options_belong_to_a_solver():
    data = problem()
    penalty = Penalty.of(data.hierarchy)
    with pytest.raises(SolverError, match="The solver 'newton' has no option 'p0'; it takes 'checkpoint'"):
        minimise(data, Gaussian(), penalty, solver="newton", options={"p0": 0.1})
    with pytest.raises(SolverError, match="The solver 'one_coin' has no option 'tau'; did you mean 'eta'"):
        minimise(data, Gaussian(), penalty, solver="one_coin", options={"tau": 0.1})
    with pytest.raises(SolverError, match="The 'options' parameter must map names to values"):
        minimise(data, Gaussian(), penalty, solver="l2gd", options=3)
    exact = minimise(data, Gaussian(), penalty, solver="sweep")
    again = minimise(data, Gaussian(), penalty, solver="al2sgd_plus", tol=1e-14, start=exact)
    assert again.convergence.iterations == 0  # it starts where the other ended


def test_a_spec_is_the_same_as_its_settings(homes):
    settings = {"formula": "log_radon ~ floor", "client": "county", "cluster": "state", "gamma": 10.0}
    assert str(plan(homes, Spec(**settings))) == str(plan(homes, **settings))
    data = problem("poisson")
    assert str(plan(data, Spec(family="poisson", gamma=3.0))) == str(plan(data, family="poisson", gamma=3.0))
    for more in ({"gamma": 1.0}, {"family": "poisson"}):
        with pytest.raises(SolverError, match=f"not both; leave out {next(iter(more))}="):
            plan(data, Spec(gamma=3.0), **more)
