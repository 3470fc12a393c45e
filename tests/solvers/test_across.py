"""The randomised algorithms across nodes: no bit depends on which node holds which client, and only sums leave a node."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from fractions import Fraction
from itertools import product

import numpy as np
import polars as pl
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from covey import GroupedData, Objective, Penalty
from covey.datasets import simulate
from covey.errors import ConvergenceWarning, SolverError
from covey.losses import loss_of
from covey.nodes.network import Arrived, Network, Node
from covey.objective.theory import Probabilities
from covey.records import decode, encode
from covey.solvers import minimise, solve
from covey.solvers.first_order.curvature import constants
from covey.solvers.first_order.l2gd import L2gdMove, StepSizes
from covey.solvers.first_order.protocol import AskMeans, Centres, Move, Pull
from covey.solvers.first_order.smoothness import rounded_down
from covey.threads import use_threads
from covey.tree.hierarchy import Hierarchy
from tests.conftest import seeds
from tests.solvers.first_order.shared import begun, constants_of, quietly


def shard(data, clients):
    """The rows of some clients, under all clusters."""
    tree = data.hierarchy
    clients = np.asarray(clients, dtype=np.int64)
    rows = np.flatnonzero(np.isin(data.client_of_row, clients))
    counts = np.bincount(tree.parent[clients], minlength=data.n_clusters)
    ptr = np.concatenate([[0], np.cumsum(data.rows_per_client[clients])])
    mine = Hierarchy(np.concatenate([[0], np.cumsum(counts)]), tree.client_ids.gather(clients), tree.cluster_ids)
    extra = {
        name: None if values is None else values[rows] for name, values in vars(data).items() if name in ("weights", "offset")
    }
    return replace(data, X=data.X[rows], y=data.y[rows], client_ptr=ptr, hierarchy=mine, **extra)


class Sharded(Network):
    """Several nodes; every message travels as bytes, and a node may be put aside on disk between two of them."""

    def __init__(self, data, loss, penalty, owner, forget=0.0):
        self.members = [np.flatnonzero(owner == name) for name in np.unique(owner)]
        self.held = [Node(shard(data, mine), loss, penalty.gamma[mine]) for mine in self.members]
        tree = data.hierarchy
        self._tree = replace(tree, client_ids=pl.Series(range(data.n_clients)))
        self._loss, self._terms, self.replies, self.arrived = loss, data.terms, [], []
        self.forget, self.rng = forget, np.random.default_rng(0)

    tree = property(lambda self: self._tree)
    terms = property(lambda self: self._terms)
    loss = property(lambda self: self._loss)

    def send(self, message):
        total = None
        for node in self.held:
            reply = decode(encode(message)).at(node)
            self.replies.append((node, reply))
            if self.rng.random() < self.forget:
                node.restore(decode(encode(node.snapshot())))
            reply = decode(encode(reply))
            total = reply if total is None else total + reply
        self.arrived.append(Arrived(message, total))

    def collect(self):
        arrived, self.arrived = self.arrived, []
        return arrived

    def theta(self):
        theta = np.empty((self.tree.n_clients, len(self.terms)))
        for mine, node in zip(self.members, self.held, strict=True):
            theta[mine] = node.theta
        return theta


def problem(seed, family, *, weighted, reduction="sum", ridge=0.0):
    """Clusters of different sizes, one of a single client; penalties equal within clusters, as a coordinator knows them."""
    rng = np.random.default_rng(seed)
    sizes = np.concatenate([[1], rng.integers(2, 9, size=int(rng.integers(0, 4)))])
    rng.shuffle(sizes)
    n, k, d = int(sizes.sum()), len(sizes), int(rng.integers(1, 5))
    parent = np.repeat(np.arange(k), sizes)
    rows = rng.integers(1, 12, size=n)
    client = np.repeat(np.arange(n), rows)
    N = len(client)
    X = rng.normal(size=(N, d))
    margin = (X * rng.normal(size=(n, d))[client]).sum(axis=1)
    y = {
        "gaussian": margin + rng.normal(size=N),
        "bernoulli": (rng.random(N) < 1 / (1 + np.exp(-margin))).astype(float),
        "poisson": rng.poisson(np.exp(np.clip(margin, -2, 2))).astype(float),
    }[family]
    y[:2] = (0, 1)[: len(y)]
    extra = {"weights": rng.uniform(0.2, 3.0, size=N), "offset": 0.3 * rng.normal(size=N)} if weighted else {}
    data = GroupedData.from_arrays(X, y, [f"c{i}" for i in client], parent[client], **extra)
    penalty = Penalty.of(data.hierarchy, gamma=rng.uniform(0.1, 5, size=k), lam=rng.uniform(0.1, 5, size=k))
    return data, loss_of(family, reduction) if not ridge else replace(loss_of(family, reduction), ridge=ridge), penalty


def same(fit, other):
    for name in ("w", "wbar"):
        np.testing.assert_array_equal(getattr(fit, name), getattr(other, name), err_msg=name)
    assert fit.history.equals(other.history)
    assert fit.convergence == other.convergence
    np.testing.assert_array_equal(fit.ledger.within, other.ledger.within)


RUNS = [
    ("l2gd", "gaussian", {}),
    ("l2gd", "gaussian", {"steps": "switching", "vote": "majority"}),
    ("l2gd", "bernoulli", {"p0": 0.2, "p": 0.3}),
    ("l2gd", "poisson", {"steps": "switching"}),
    ("one_coin", "gaussian", {}),
    ("one_coin", "bernoulli", {"vote": "majority"}),
    ("al2sgd_plus", "gaussian", {}),
    ("al2sgd_plus", "bernoulli", {"vote": "majority"}),
    ("al2sgd_plus", "poisson", {}),
]


@quietly
@pytest.mark.parametrize(("solver", "family", "options"), RUNS)
@settings(max_examples=8, deadline=None)
@given(seed=seeds, draw=st.data())
def test_any_sharding_gives_the_same_bits(solver, family, options, seed, draw):
    weighted, reduction = draw.draw(st.booleans()), draw.draw(st.sampled_from(["sum", "mean"]))
    ridge = draw.draw(st.sampled_from([0.0, 0.3]))
    data, loss, penalty = problem(seed, family, weighted=weighted, reduction=reduction, ridge=ridge)
    limits = {"solver": solver, "tol": 1e-3, "max_iter": 150, "seed": seed % 1000, "options": {"every": 40, **options}}
    assume(constants_of(Objective(data, loss, penalty)).mu > 0)  # else no rate is known, and no solver begins
    whole = minimise(data, loss, penalty, **limits)
    owner = np.array(draw.draw(st.lists(st.integers(0, 4), min_size=data.n_clients, max_size=data.n_clients)))
    network = Sharded(data, loss, penalty, owner, forget=0.2)
    fit = solve(network, penalty, **limits)
    same(fit, whole)
    np.testing.assert_array_equal(network.theta(), whole.theta)


@quietly
@pytest.mark.parametrize("family", ["gaussian", "bernoulli"])
@pytest.mark.parametrize("solver", ["l2gd", "al2sgd_plus"])
def test_many_clients_beside_each_other(solver, family, always_share):
    """More clients than a thread takes at a time, more rows than are worked on together, on one thread and on two."""
    data = simulate(family, clusters=3, clients=700, rows=7, d=3, equal_rows=False, client_sd=0.5, seed=1).data
    penalty = Penalty.of(data.hierarchy, gamma=[1.0, 2.0, 3.0], lam=2.0)
    limits = {"solver": solver, "tol": 0.0, "max_iter": 60, "options": {"every": 30}}
    whole = minimise(data, loss_of(family), penalty, **limits)
    owners = [(1, np.arange(2100) // 300), (1, np.random.default_rng(0).integers(0, 20, size=2100)), (2, np.arange(2100) % 3)]
    for threads, owner in owners:
        network = Sharded(data, loss_of(family), penalty, owner)
        with use_threads(threads):
            same(solve(network, penalty, **limits), whole)
        np.testing.assert_array_equal(network.theta(), whole.theta)


@pytest.mark.parametrize("family", ["gaussian", "bernoulli"])
def test_a_kernel_with_fast_arithmetic_sums_exactly(family):
    """What may be reordered there is the clients' own steps, not the sums over them: these have the bits of rational ones."""
    data = simulate(family, clusters=3, clients=300, rows=4, d=3, seed=1).data
    penalty, k = Penalty.of(data.hierarchy, gamma=0.7), data.n_clusters
    drawn, total = Probabilities(0.3, np.full(k, 0.4), np.full(k, 0.5)), Centres.of(penalty).total
    start = np.random.default_rng(0).normal(size=(data.n_clients, 3))
    network = begun(data, loss_of(family), penalty, drawn, StepSizes(1e-3), start)
    everybody, steps = np.ones(k, dtype=bool), np.full(k, 5)
    moved = network.ask(L2gdMove(Move(Pull.none(k, 3), everybody, 0 * steps, steps, everybody))).total
    asked = network.ask(AskMeans(total)).total
    np.testing.assert_array_equal(moved.limbs, asked.limbs)
    share, tree = penalty.gamma / total[data.hierarchy.parent], data.hierarchy
    for j, a in product(range(k), range(3)):
        mine = slice(tree.cluster_ptr[j], tree.cluster_ptr[j + 1])
        exactly = sum(Fraction(value) for value in (share[mine] * network.node.theta[mine, a]).tolist())
        assert abs(Fraction(moved.integers()[j, a], 2**96) - exactly) <= Fraction(300, 2**97)


def arrays(message):
    if isinstance(message, np.ndarray):
        yield message
    elif is_dataclass(message):
        for part in fields(message):
            yield from arrays(getattr(message, part.name))
    elif isinstance(message, tuple | list):
        for part in message:
            yield from arrays(part)
    else:
        assert message is None or isinstance(message, bool | int | float | str), message


@quietly
@pytest.mark.parametrize(("solver", "family", "options"), RUNS)
def test_no_reply_has_a_row_for_each_client(solver, family, options):
    """11 and 13 clients at two nodes, 4 clusters, 3 coefficients, hundreds of rows: no array is as long as any of these."""
    rng = np.random.default_rng(0)
    client = np.repeat(np.arange(24), 17)
    X = rng.normal(size=(len(client), 3))
    y = {"gaussian": X[:, 0], "bernoulli": (X[:, 0] > rng.normal(size=len(X))) * 1.0, "poisson": rng.poisson(1.0, size=len(X))}
    data = GroupedData.from_arrays(X, y[family], client, client % 4)
    owner, penalty = (data.hierarchy.client_ids.to_numpy() >= 11) * 1, Penalty.of(data.hierarchy)
    network = Sharded(data, loss_of(family), penalty, owner)
    solve(network, penalty, solver=solver, tol=1e-2, max_iter=100, options=options)
    assert {node.data.n_clients for node in network.held} == {11, 13}
    seen = 0
    for node, reply in network.replies:
        for array in arrays(reply):
            seen += 1
            assert not {node.data.n_clients, node.data.n_rows} & set(array.shape), (type(reply), array.shape)
    assert seen > 100


@settings(max_examples=20, deadline=None)
@given(seed=seeds, family=st.sampled_from(["gaussian", "bernoulli", "poisson"]), ridge=st.sampled_from([0.0, 0.2]))
def test_constants_are_those_of_all_clients_together(seed, family, ridge):
    data, loss, penalty = problem(seed, family, weighted=True, ridge=ridge)
    known = constants_of(Objective(data, loss, penalty))
    network = Sharded(data, loss, penalty, np.random.default_rng(seed).integers(0, 4, size=data.n_clients), forget=0.3)
    across = constants(network, penalty, clusters=("client", "row"))
    for part in fields(known):
        np.testing.assert_array_equal(getattr(known, part.name), getattr(across, part.name), err_msg=part.name)
    assert all(node.theta is None or not node.theta.any() for node in network.held)


@settings(max_examples=30, deadline=None)
@given(seed=seeds)
def test_curvature_is_the_smallest_eigenvalue_of_the_hessian(seed):
    """Against the Hessian written out, in few dimensions and in many."""
    data, loss, penalty = problem(seed, "gaussian", weighted=True)
    objective, size = Objective(data, loss, penalty), data.n_clients * data.n_terms
    zero = objective.gradient(np.zeros((data.n_clients, data.n_terms))).ravel()
    unit = np.eye(size).reshape(size, data.n_clients, data.n_terms)
    values = np.linalg.eigvalsh(np.array([objective.gradient(e).ravel() - zero for e in unit]))
    mu = constants_of(objective).mu
    if mu == 0:
        assert values[0] < 1e-8 * values[-1]
    elif size < 32:
        assert mu == pytest.approx(rounded_down(values[0]), rel=2e-3)
        assert mu <= values[0] * (1 + 1e-9)
    else:
        assert 0.995 * values[0] <= mu <= values[0] * (1 + 1e-9)


def test_what_only_memory_can_do_is_refused():
    data, loss, penalty = problem(3, "gaussian", weighted=False)
    network = Sharded(data, loss, penalty, np.zeros(data.n_clients))
    with pytest.raises(SolverError, match="The 'checkpoint' parameter does not work across sites"):
        solve(network, penalty, solver="l2gd", options={"checkpoint": "run.npz"})
    with pytest.raises(SolverError, match="james_stein=True needs the curvature, which 'l2gd'"):
        solve(network, penalty, solver="l2gd", james_stein=True)


def test_across_sites_the_diverging_client_is_not_named():
    data, loss, penalty = problem(3, "gaussian", weighted=False)
    network = Sharded(data, loss, penalty, np.arange(data.n_clients) % 2)
    with (
        pytest.warns(ConvergenceWarning, match="eta"),
        pytest.raises(SolverError, match=r"The iterate of some client is no longer finite by iteration [\d,]+; give a smaller"),
    ):
        solve(network, penalty, solver="l2gd", max_iter=100_000, options={"eta": 50.0})
