"""The fast code against the algorithms written out, on the same random choices: unequal penalties, mixing and probabilities."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from covey import GroupedData, Objective, Penalty
from covey.losses import loss_of
from covey.objective.theory import Probabilities
from covey.solvers import minimise, reference, registry
from covey.solvers.first_order import al2sgd_plus, l2gd, one_coin
from covey.solvers.first_order.schedule import Schedule
from tests.solvers.first_order.shared import constants_of, quietly

FAMILIES = ["gaussian", "bernoulli", "poisson"]
T = 120


def problem(family, *, equal=False):
    """Three clusters of 2, 3 and 1 clients with 4 to 9 rows, weights and offsets; gamma, alpha and p all differ."""
    rng = np.random.default_rng(5)
    parent, rows, d = np.array([0, 0, 1, 1, 1, 2]), np.array([5, 9, 4, 6, 7, 8]), 3
    client = np.repeat(np.arange(6), rows)
    X = rng.normal(size=(len(client), d))
    margin = X @ np.array([0.5, -0.4, 0.2]) + 0.1 * client
    y = {
        "gaussian": margin + rng.normal(size=len(X)),
        "bernoulli": (rng.random(len(X)) < 1 / (1 + np.exp(-margin))) * 1.0,
        "poisson": rng.poisson(np.exp(margin)) * 1.0,
    }[family]
    extra = {"weights": rng.uniform(0.5, 2.0, size=len(X)), "offset": 0.2 * rng.normal(size=len(X))}
    data = GroupedData.from_arrays(X, y, client, parent[client], **extra)
    gamma = np.array([1.0, 1.0, 0.4, 0.4, 0.4, 2.0]) if equal else rng.uniform(0.3, 3.0, size=6)
    return data, Penalty.of(data.hierarchy, gamma=gamma, alpha=[0.2, 0.5, 0.7])


START = 0.2 * np.random.default_rng(1).normal(size=(6, 3))


@quietly
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("steps", ["constant", "switching"])
@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("vote", ["central", "majority"])
def test_l2gd_is_algorithm_1(family, steps, equal, vote):
    """Where gamma is equal within each cluster, consecutive steps towards averages share one exchange."""
    (data, penalty), loss = problem(family, equal=equal), replace(loss_of(family, "mean"), ridge=0.05)
    known = constants_of(Objective(data, loss, penalty))
    chances = {"p0": 0.3, "p": [0.2, 0.5, 0.4], "tau": [0.3, 0.6, 0.5]}
    best = l2gd.recipe(known, **chances)
    mu = best.smoothness / 8  # so that both kinds of step are taken
    rate = l2gd.StepSizes(best.largest_step, mu if steps == "switching" else 0.0)
    assert steps == "constant" or rate.last < T / 2
    choices = Schedule(best.probabilities, 7, vote=vote).choices(0, T)
    slow = reference["l2gd"](Objective(data, loss, penalty), best.probabilities, choices, rate.at, START)
    control = {"seed": 7, "tol": 0.0, "max_iter": T, "start": START, "vote": vote, "mu": mu, "every": 50}
    fast = minimise(data, loss, penalty, solver="l2gd", steps=steps, **chances, **control)
    np.testing.assert_allclose(fast.theta, slow, rtol=0, atol=1e-10)


@quietly
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("steps", ["constant", "switching"])
def test_one_coin_is_the_variant_of_the_papers_experiments(family, steps):
    (data, penalty), loss = problem(family), replace(loss_of(family, "mean"), ridge=0.05)
    best = one_coin.recipe(constants_of(Objective(data, loss, penalty)), 0.3)
    mu = best.smoothness / 8
    rate = l2gd.StepSizes(best.largest_step, mu if steps == "switching" else 0.0)
    choices = Schedule(best.probabilities, 3).choices(0, T)
    slow = reference["one_coin"](Objective(data, loss, penalty), best.probabilities, choices, rate.at, START)
    control = {"seed": 3, "tol": 0.0, "max_iter": T, "start": START, "mu": mu, "every": 50}
    fast = minimise(data, loss, penalty, solver="one_coin", steps=steps, p=0.3, **control)
    np.testing.assert_allclose(fast.theta, slow, rtol=0, atol=1e-10)


@quietly
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_al2sgd_plus_is_algorithm_2(family, reduction):
    (data, penalty), loss = problem(family), replace(loss_of(family, reduction), ridge=0.05)
    known = constants_of(Objective(data, loss, penalty))
    chances = {"p0": 0.2, "p": [0.2, 0.5, 0.4], "tau": [0.3, 0.6, 0.5], "rho": 0.15}
    best = al2sgd_plus.recipe(known, **chances)
    pace = al2sgd_plus.Katyusha.of(known, best.smoothness, 0.15)
    choices = Schedule(best.probabilities, 11).choices(0, T)
    assert choices.refresh.sum() > 5
    slow = reference["al2sgd_plus"](Objective(data, loss, penalty), best.probabilities, choices, pace, START, 11)
    control = {"seed": 11, "tol": 0.0, "max_iter": T, "start": START, "every": 50}
    fast = minimise(data, loss, penalty, solver="al2sgd_plus", **chances, **control)
    np.testing.assert_allclose(fast.theta, slow, rtol=0, atol=1e-10)


def test_every_randomised_algorithm_has_a_reference():
    assert set(reference) == set(registry.first_order())


def test_one_coin_is_algorithm_1_with_one_probability():
    data, penalty = problem("gaussian")
    objective = Objective(data, loss_of("gaussian"), penalty)
    chances, start = Probabilities(0.3, np.zeros(3), np.ones(3)), np.ones((6, 3))
    choices = Schedule(chances, 1).choices(0, T)
    both = [reference[name](objective, chances, choices, lambda t: 0.01, start) for name in ("l2gd", "one_coin")]
    np.testing.assert_allclose(both[0], both[1], atol=1e-12)
