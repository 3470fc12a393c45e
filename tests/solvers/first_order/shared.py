"""What the tests of the randomised algorithms share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from covey import GroupedData, Penalty
from covey.datasets import simulate
from covey.losses import Gaussian
from covey.nodes.network import InMemory
from covey.objective.theory import Probabilities
from covey.solvers.first_order.curvature import constants
from covey.solvers.first_order.l2gd import L2gdBegin, L2gdMove, StepSizes, equal_within, next_pull
from covey.solvers.first_order.loop import run_rounds
from covey.solvers.first_order.protocol import Centres
from covey.solvers.first_order.schedule import Choices, Schedule

SOLVERS = ("l2gd", "one_coin", "al2sgd_plus")  # the algorithms of the paper

quietly = pytest.mark.filterwarnings("ignore::covey.errors.ConvergenceWarning")


@dataclass(frozen=True)
class Clients:
    data: GroupedData
    penalty: Penalty


def constants_of(objective, **given):
    """The constants of a problem in memory."""
    network = InMemory.of(objective.data, objective.loss, objective.penalty.gamma)
    return constants(network, objective.penalty, clusters=("client", "row"), **given)


def outcomes(drawn, k):
    """Every outcome of one iteration's random choices, with its probability."""
    none = np.zeros((1, k), dtype=bool)
    if drawn.p0 > 0 and drawn.present is None:
        yield drawn.p0, Choices(np.array([True]), none, np.array([False]))
    elif drawn.p0 > 0:
        for here in product([False, True], repeat=k):
            chance = drawn.p0 * np.prod(np.where(here, drawn.present, 1 - drawn.present))
            yield chance, Choices(np.array([True]), none, np.array([False]), np.array([here]))
    for exchange in product([False, True], repeat=k):
        chance = np.prod(np.where(exchange, drawn.p, 1 - drawn.p))
        if chance > 0:
            present = None if drawn.present is None else np.ones((1, k), dtype=bool)
            yield (1 - drawn.p0) * chance, Choices(np.array([False]), np.array([exchange]), np.array([False]), present)


def some_probabilities(k, rng, p0=0.3):
    """Probabilities that differ between clusters, one of them zero; tau not the best."""
    p = rng.uniform(0.1, 0.8, size=k)
    p[0] = 0.0
    tau = np.where(p > 0, rng.uniform(0.1, 0.9, size=k), 1.0)
    return Probabilities(p0, p, tau)


def begun(data, loss, penalty, drawn, rate, start, closed=None):
    """A network in memory at the start of algorithm 1."""
    network = InMemory.of(data, loss, penalty.gamma, start)
    closed = loss.name == "gaussian" if closed is None else closed
    network.ask(L2gdBegin(drawn.local, rate, Centres.of(penalty).total, closed))
    return network


def l2gd_rounds(network, penalty, drawn, rate, rounds):
    """Run some rounds of Algorithm 1 from where the network is."""
    top, (_, gamma) = Centres.of(penalty), equal_within(network.tree, penalty)
    setup = SimpleNamespace(
        move=L2gdMove, next_pull=partial(next_pull, top, drawn.shares(top.alpha), rate, gamma, drawn.present)
    )
    no_anchor = np.zeros((1, 1))
    assert run_rounds(network, setup, top, rounds, no_anchor)[1] is None


def follow(problem, drawn, eta, start, seed, times):
    """The iterates of one run at some times."""
    data, penalty, loss = problem.data, problem.penalty, Gaussian()
    network = begun(data, loss, penalty, drawn, StepSizes(eta), start)
    merge = drawn.present is None and equal_within(data.hierarchy, penalty)[0]
    schedule, t, path = Schedule(drawn, seed, merge), 0, []
    for until in times:
        if until > t:
            l2gd_rounds(network, penalty, drawn, StepSizes(eta), schedule.rounds(t, until))
        t = until
        path.append(network.node.theta)
    return np.array(path)


def conditioned(kappa, common):
    """Clients whose Hessians are all diag(1/kappa, ..., 1): moving all of them along the first axis costs 1/kappa and no
    penalty, so that the smallest curvature is attained. With ``common`` one model explains every row: no noise."""
    rng = np.random.default_rng(0)
    n, d = 6, 3
    X = np.tile(np.diag(np.sqrt([1 / kappa, 1 / np.sqrt(kappa), 1.0])), (n, 1))
    theta = np.ones((n, d)) if common else 1.0 + rng.normal(size=(n, d))
    y = np.einsum("la,la->l", X, np.repeat(theta, d, axis=0))
    data = GroupedData.from_arrays(X, y, np.repeat(np.arange(n), d), np.repeat(np.arange(2), 3 * d))
    return data, Penalty.of(data.hierarchy, gamma=0.1, alpha=0.4)


def many_clients(family, clients=400):
    drawn = simulate(family, clusters=3, clients=clients, rows=5, d=3, equal_rows=False, client_sd=0.5, cluster_sd=0.5, seed=1)
    data = drawn.data
    return data, Penalty.of(data.hierarchy, gamma=2.0, lam=2.0)
