"""Both forms of the objective, their equivalence, and the penalties."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from scipy.optimize import approx_fprime

from covey import GroupedData, Objective, Penalty
from covey.errors import PenaltyError
from covey.losses import loss_of
from covey.solvers import minimise
from tests.conftest import random_problem, seeds

FAMILIES = ("gaussian", "bernoulli", "poisson")


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_values(family):
    problem = random_problem(11, family)
    objective = Objective(problem.data, loss_of(family), problem.penalty)
    theta = 0.3 * np.random.default_rng(0).normal(size=(problem.data.n_clients, problem.data.n_terms))
    differences = approx_fprime(theta.ravel(), lambda flat: objective.value(flat.reshape(theta.shape)), 1e-7)
    np.testing.assert_allclose(objective.gradient(theta).ravel(), differences, rtol=1e-4, atol=1e-4)


@given(seeds)
def test_the_forms_agree_once_the_centres_are_best(seed):
    problem = random_problem(seed)
    objective = Objective(problem.data, loss_of("gaussian"), problem.penalty)
    theta = np.random.default_rng(seed).normal(size=(problem.data.n_clients, problem.data.n_terms))
    w, wbar = objective.centres(theta)
    assert objective.multitask_value(theta, w, wbar) == pytest.approx(objective.value(theta), rel=1e-10)
    # The multi-task form is quadratic in the centres: at the best ones, a step either way increases it by the same amount.
    for step in (np.full_like(w, 0.1), np.random.default_rng(seed).normal(size=w.shape)):
        for moved in ((step, 0.0), (0.0, step[0])):
            up, down = (objective.multitask_value(theta, w + s * moved[0], wbar + s * moved[1]) for s in (1, -1))
            assert up == pytest.approx(down, rel=1e-9)
            assert up >= objective.multitask_value(theta, w, wbar) * (1 - 1e-12)


@pytest.mark.parametrize("family", FAMILIES)
@given(seed=seeds)
def test_alpha_and_lam_are_two_names_of_one_penalty(family, seed):
    problem = random_problem(seed, family)
    by_lam = problem.penalty
    by_alpha = Penalty.of(problem.data.hierarchy, gamma=problem.gamma, alpha=by_lam.alpha)
    np.testing.assert_allclose(by_alpha.lam, by_lam.lam, rtol=1e-10)
    first, second = (minimise(problem.data, loss_of(family), penalty) for penalty in (by_lam, by_alpha))
    np.testing.assert_allclose(second.theta, first.theta, atol=1e-10)
    np.testing.assert_allclose(second.wbar, first.wbar, atol=1e-10)
    w, wbar = Objective(problem.data, loss_of(family), by_lam).centres(first.theta)
    np.testing.assert_allclose(w, first.w, atol=1e-8)
    np.testing.assert_allclose(wbar, first.wbar, atol=1e-8)


def test_tbar_is_the_weighted_mean():
    """Errata 1: the two forms of tbar in the paper differ if clusters have unequal totals; covey uses the weighted one."""
    data = GroupedData.from_arrays(np.ones((3, 1)), [0.0, 0.0, 0.0], ["a", "b", "c"], ["x", "x", "y"])
    penalty = Penalty.of(data.hierarchy, gamma=np.array([1.0, 3.0, 2.0]), alpha=np.array([0.5, 0.25]))
    theta = np.array([[1.0], [2.0], [6.0]])
    _, tbar = Objective(data, loss_of("gaussian"), penalty).means(theta)
    weighted = (0.5 * (1 * 1 + 3 * 2) + 0.25 * 2 * 6) / (0.5 * 4 + 0.25 * 2)
    unweighted = (0.5 * (1 * 1 + 3 * 2) / 4 + 0.25 * 6) / 0.75
    assert tbar[0] == pytest.approx(weighted)
    assert abs(weighted - unweighted) > 0.1


def test_alpha_zero_and_one():
    tree = random_problem(5).data.hierarchy
    assert np.isinf(Penalty.of(tree, alpha=1.0).lam).all()
    assert (Penalty.of(tree, alpha=1.0).alpha == 1).all()
    assert (Penalty.of(tree, alpha=0.0).lam == 0).all()


def test_penalties_by_number_array_and_mapping():
    tree = GroupedData.from_arrays(np.ones((3, 1)), np.zeros(3), ["a", "b", "c"], ["x", "x", "y"]).hierarchy
    np.testing.assert_array_equal(Penalty.of(tree, gamma=2.0).gamma, [2, 2, 2])
    np.testing.assert_array_equal(Penalty.of(tree, gamma=[2.0, 5.0]).gamma, [2, 2, 5])
    np.testing.assert_array_equal(Penalty.of(tree, gamma=[1.0, 2.0, 3.0]).gamma, [1, 2, 3])
    np.testing.assert_array_equal(Penalty.of(tree, gamma={"y": 5.0, "x": 2.0}).gamma, [2, 2, 5])
    np.testing.assert_array_equal(Penalty.of(tree, gamma={"c": 3.0, "a": 1.0, "b": 2.0}).gamma, [1, 2, 3])
    np.testing.assert_array_equal(Penalty.of(tree, lam={"y": 5.0, "x": 2.0}).lam, [2, 5])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gamma": -1.0}, r"'gamma' parameter must lie in \[0, inf\). Got -1 instead"),
        ({"gamma": float("nan")}, r"'gamma' parameter must lie in \[0, inf\). Got nan instead"),
        ({"gamma": float("inf")}, r"'gamma' parameter must lie in \[0, inf\). Got inf instead"),
        ({"gamma": [1.0, -2.0]}, r"Got -2 for cluster 'y' instead"),
        ({"gamma": 0.0}, r"gamma is 0 for every client of cluster 'x'.*locally-trained"),
        (
            {"gamma": [1.0] * 5},
            r"'gamma' parameter must hold 1, 3 \(one for each client\) or 2 \(one for each cluster\) values",
        ),
        ({"gamma": "strong"}, r"'gamma' parameter must be a number"),
        ({"gamma": {"a": 1.0, "b": 2.0}}, r"no value for client 'c'"),
        ({"lam": {"x": 1.0, "y": 2.0, "z": 3.0}}, r"value for 'z', which is not a cluster"),
        ({"lam": -0.5}, r"'lam' parameter must lie in \[0, inf\]"),
        ({"alpha": 1.5}, r"'alpha' parameter must lie in \[0, 1\]. Got 1.5 instead"),
        ({"alpha": 0.5, "lam": 1.0}, r"Give lam or alpha, not both"),
    ],
)
def test_penalties_out_of_range(arguments, message):
    tree = GroupedData.from_arrays(np.ones((3, 1)), np.zeros(3), ["a", "b", "c"], ["x", "x", "y"]).hierarchy
    with pytest.raises(ValueError, match=message):
        Penalty.of(tree, **arguments)


def test_penalties_by_clusters_that_are_dates():
    from datetime import date

    days = [date(2020, 1, day) for day in (1, 1, 2)]
    data = GroupedData.from_arrays(np.ones((3, 1)), np.arange(3.0), ["a", "b", "c"], days)
    penalty = Penalty.of(data.hierarchy, gamma={days[0]: 2.0, days[2]: 3.0})
    assert penalty.gamma.tolist() == [2.0, 2.0, 3.0]
    with pytest.raises(PenaltyError, match=r"no value for cluster datetime.date\(2020, 1, 2\)"):
        Penalty.of(data.hierarchy, gamma={days[0]: 2.0})
