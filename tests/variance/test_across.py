"""Variance components over several nodes are those of one node, for any assignment of clients to nodes."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey import GroupedData
from covey.datasets import load_radon
from covey.errors import ConvergenceWarning, DataError, PenaltyError, SolverError
from covey.fitting.fit import learn
from covey.losses import Bernoulli, Gaussian, loss_of
from covey.model.posterior import Posterior
from covey.nodes.network import InMemory
from covey.problem.problem import Spec, resolve
from covey.records import decode, encode
from covey.variance.columns import node_learned
from covey.variance.estimate import estimate, likelihood_ratios
from covey.variance.identify import survey
from covey.variance.parameters import Shape
from tests.conftest import seeds
from tests.networks import Sharded, in_memory, leaves

BOTH = Shape((0, 1), (0, 1))
CASES = {
    "reml": ("gaussian", BOTH, True),
    "ml": ("gaussian", BOTH, False),
    "full": ("gaussian", Shape((0, 1), (0, 1), "full", "full"), True),
    "isotropic": ("gaussian", Shape((0, 1), (0, 1), "isotropic", "isotropic"), True),
    "per cluster": ("gaussian", Shape((0,), (0,), per_cluster=True), True),
    "terms out of order": ("gaussian", Shape((1,), (1, 2)), True),
    "clusters only": ("gaussian", Shape((), (0,)), True),
    "bernoulli": ("bernoulli", Shape((0,), (0,)), False),
    "bernoulli, full": ("bernoulli", Shape((0, 1), (0,), "full"), False),
    "poisson": ("poisson", Shape((0,), (0, 1)), False),
    "poisson, per cluster": ("poisson", Shape((1,), (0,), per_cluster=True), False),
}


def table(seed, family, *, clusters=4, clients=6, client_sd=0.6, cluster_sd=0.5, weighted=True, rows=12):
    """Three columns, the first of ones; unequal clients, weights and an offset."""
    rng = np.random.default_rng(seed)
    n = clusters * clients
    counts = rng.integers(rows // 2, rows + rows // 2, size=n)
    client = np.repeat(np.arange(n), counts)
    X = rng.normal(size=(len(client), 3))
    X[:, 0] = 1.0
    own = np.array([1.0, 1.0, 0.0]) * (
        client_sd * rng.normal(size=(n, 3)) + cluster_sd * rng.normal(size=(clusters, 3))[np.arange(n) // clients]
    )
    offset = 0.2 * rng.normal(size=len(client)) if weighted else np.zeros(len(client))
    margin = np.einsum("la,la->l", X, np.array([0.3, 0.4, -0.2]) + own[client]) + offset
    weights = rng.uniform(0.5, 2.0, size=len(client)) if weighted else None
    y = loss_of(family).draw(margin, rng)
    return GroupedData.from_arrays(
        X, y, client, client // clients, weights=weights, offset=offset, terms=["Intercept", "x", "z"]
    )


def random_owner(data, seed, sites=3):
    """A random node for each client, so that clusters are split and some nodes have no clients of a cluster."""
    return np.random.default_rng(seed).integers(0, sites, size=data.n_clients)


def assert_same(network, across, fit, learned, atol):
    found, known = across
    for ours, theirs in ((found.w, fit.w), (found.wbar, fit.wbar), (network.gathered(), fit.theta)):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol)
    one, two = known.components, learned.components
    assert one.log_likelihood == pytest.approx(two.log_likelihood, abs=atol * max(1.0, abs(two.log_likelihood)))
    for level in ("client", "cluster"):
        mine, other = getattr(one, level), getattr(two, level)
        assert mine.terms == other.terms
        np.testing.assert_allclose(mine.covariance, other.covariance, rtol=0, atol=atol)
        np.testing.assert_allclose(mine.sd_error, other.sd_error, rtol=1e-5)
    if two.residual is not None:
        assert one.residual == pytest.approx(two.residual, abs=atol)
    np.testing.assert_allclose(known.covariance, learned.covariance, rtol=1e-5)
    np.testing.assert_allclose(one.shares, two.shares, rtol=0, atol=atol)
    assert (one.notes, one.rows, one.parameters, one.method) == (two.notes, two.rows, two.parameters, two.method)


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=3)
@given(seeds, st.integers(1, 5))
def test_any_sharding_gives_the_fit_of_one_node(case, seed, sites):
    family, shape, reml = CASES[case]
    data, loss = table(seed % 5, family), loss_of(family)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        fit, learned = estimate(in_memory(data, loss), shape, reml=reml)
        network = Sharded.of(data, loss, random_owner(data, seed, sites))
        across = estimate(network, shape, reml=reml)
    assert_same(network, across, fit, learned, 1e-10 if family == "gaussian" else 1e-9)
    assert across[0].theta.shape == (0, 3)
    assert not across[1].has_sums


@pytest.mark.parametrize("family", ["gaussian", "bernoulli", "poisson"])
def test_nodes_that_lose_their_cache_give_the_same_bits(family):
    data, loss, shape = table(1, family), loss_of(family), Shape((0, 1), (0,), "full")
    owner = random_owner(data, 1)
    found = []
    for forgets in (False, True):
        network = Sharded.of(data, loss, owner, forgets=forgets)
        fit, learned = estimate(network, shape, thorough=True)
        found.append((network.gathered(), fit.w, fit.wbar, learned.components.client.covariance))
    for one, two in zip(*found, strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize(("family", "seed"), [("gaussian", 3), ("poisson", 10)])
def test_a_level_without_variation(family, seed):
    data = table(seed, family, client_sd=0.0, cluster_sd=0.8, weighted=False)
    fit, learned = estimate(in_memory(data, loss_of(family)), Shape((0,), (0,)))
    network = Sharded.of(data, loss_of(family), random_owner(data, 3))
    across = estimate(network, Shape((0,), (0,)))
    assert learned.components.notes == ("singular: no variation between clients",)
    assert_same(network, across, fit, learned, 1e-10)


def test_columns_far_from_zero_and_a_tiny_residual():
    near = table(2, "gaussian")
    far = replace(near, X=near.X + np.array([0.0, 2000.0, 0.0]))
    shape = Shape((0, 1), (), "full")
    fit, learned = estimate(in_memory(far, Gaussian()), shape)
    network = Sharded.of(far, Gaussian(), random_owner(far, 2))
    found, known = estimate(network, shape)
    np.testing.assert_allclose(found.wbar, fit.wbar, rtol=1e-7)
    np.testing.assert_allclose(network.gathered(), fit.theta, rtol=1e-6)
    np.testing.assert_allclose(known.components.client.covariance, learned.components.client.covariance, rtol=1e-6)
    own = [node_learned(node, known.components, known.covariance) for node in network.held]
    np.testing.assert_allclose(sum(each.units.C.sum(axis=0) for each in own), learned.units.C.sum(axis=0), rtol=1e-10)

    rng = np.random.default_rng(0)
    client = near.client_of_row
    exact = replace(near, y=rng.normal(size=24)[client] + 0.5 * near.X[:, 1] + 1e-5 * rng.normal(size=len(client)), offset=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the last digits of the criterion itself are rounding
        fit, learned = estimate(in_memory(exact, Gaussian()), Shape((0,), (0,)))
        network = Sharded.of(exact, Gaussian(), random_owner(exact, 2))
        found, known = estimate(network, Shape((0,), (0,)))
    assert known.components.residual == pytest.approx(learned.components.residual, rel=1e-4)
    np.testing.assert_allclose(network.gathered(), fit.theta, rtol=0, atol=1e-6)  # a tenth of the residual


@pytest.mark.parametrize("family", ["gaussian", "bernoulli"])
def test_likelihood_ratios(family):
    data, loss, shape = table(4, family), loss_of(family), Shape((0,), (0,))
    network = Sharded.of(data, loss, random_owner(data, 4))
    known, whole = survey(network, shape), survey(in_memory(data, loss), shape)
    across = estimate(network, shape, surveyed=known)[1]
    before = network.gathered().copy()
    ours = likelihood_ratios(known, across, shape)
    np.testing.assert_array_equal(network.gathered(), before)  # tests leave the fit as it was
    theirs = likelihood_ratios(whole, estimate(whole.network.network, shape, surveyed=whole)[1], shape)
    for one, two in zip(ours, theirs, strict=True):
        assert (one.level, one.parameters) == (two.level, two.parameters)
        assert one.statistic == pytest.approx(two.statistic, abs=1e-7)


@pytest.mark.parametrize("family", ["gaussian", "bernoulli", "poisson"])
def test_intervals_at_a_node_are_those_of_one_node_with_all_clients(family):
    data, loss, shape = table(5, family), loss_of(family), Shape((0, 1), (0,))
    _, learned = estimate(in_memory(data, loss), shape)
    network = Sharded.of(data, loss, random_owner(data, 5))
    _, across = estimate(network, shape)
    whole = Posterior(learned)
    operator = Posterior(across)
    for level in ("global", "cluster"):
        np.testing.assert_allclose(operator.standard_errors(level), whole.standard_errors(level), rtol=1e-6)
    np.testing.assert_allclose(operator.freedom(), whole.freedom(), rtol=1e-5)
    linear = family == "gaussian"
    assert (operator.draws is not None) == linear
    if linear:
        for ours, theirs in zip(
            operator.coefficient_intervals("cluster", 0.9), whole.coefficient_intervals("cluster", 0.9), strict=True
        ):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    for node, mine in zip(network.held, network.owned, strict=True):
        here = node_learned(node, across.components, across.covariance, across.whole)
        own = Posterior(replace(here, satterthwaite=across.satterthwaite, draws=across.draws))
        if linear:
            for ours, theirs in zip(
                own.coefficient_intervals("client", 0.9), whole.coefficient_intervals("client", 0.9), strict=True
            ):
                np.testing.assert_allclose(ours, theirs[mine], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(own.clients, whole.clients[mine], rtol=1e-6, atol=1e-10)
        np.testing.assert_allclose(own.new_clients, whole.new_clients, rtol=1e-6, atol=1e-10)
        np.testing.assert_allclose(own.freedom(), whole.freedom(), rtol=1e-5)
        with pytest.raises(SolverError, match="one part of a fit across sites"):
            own.require_sums(all_clients=True)


# Replies


@pytest.mark.parametrize("case", ["full", "per cluster", "bernoulli, full", "poisson"])
def test_replies_contain_no_array_per_client(case):
    """No array in a reply has one entry per client, and the number and lengths of arrays do not depend on the clients."""
    family, shape, reml = CASES[case]
    shapes = []
    for clients in (6, 9):
        data = table(6, family, clients=clients)
        owner = np.where(np.arange(data.n_clients) < 10, 0, 1)  # 25 is a number of nodes of a quadrature
        network = Sharded.of(data, loss_of(family), owner, listens=True)
        known = survey(network, shape)
        likelihood_ratios(known, estimate(network, shape, reml=reml, surveyed=known)[1], shape, reml=reml)
        kinds = {}
        for request, replies in network.asked:
            for node, reply in zip(network.held, replies, strict=True):
                arrays = [leaf for leaf in leaves(reply) if isinstance(leaf, np.ndarray)]
                assert node.data.n_clients not in {size for array in arrays for size in array.shape}
                assert node.data.n_rows not in {size for array in arrays for size in array.shape}
                assert len(list(leaves(reply))) < 30
                kinds.setdefault(type(request).__name__, {array.ndim for array in arrays})
        shapes.append(kinds)
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("family", ["gaussian", "poisson"])
def test_messages_replies_and_states_can_be_encoded_and_decoded(family):
    data, loss = table(1, family), loss_of(family)
    network = Sharded.of(data, loss, random_owner(data, 1), listens=True)
    estimate(network, Shape((0,), (0,)))
    for message in [each for request, replies in network.asked for each in (request, *replies)]:
        assert encode(decode(encode(message))) == encode(message)
    for node in network.held:
        assert encode(decode(encode(node.snapshot()))) == encode(node.snapshot())


# Errors


def rows(client, cluster, *, x=None, y=None, loss=Gaussian(), terms=("Intercept", "x")):  # noqa: B008
    rng = np.random.default_rng(0)
    x = rng.normal(size=len(client)) if x is None else x
    y = loss.draw(0.5 * rng.normal(size=len(client))[client], rng) if y is None else y
    return GroupedData.from_arrays(np.column_stack([np.ones(len(client)), x]), y, client, cluster, terms=terms)


CLIENT = np.repeat(np.arange(20), 6)
ONE_ROW = np.arange(80)
CONSTANT = np.random.default_rng(1).normal(size=20)[CLIENT]
REFUSED = [
    (rows(CLIENT, CLIENT), BOTH, "Every cluster has one client"),
    (rows(ONE_ROW, ONE_ROW // 8), Shape((0,), (0,)), "Every client has one row"),
    (rows(CLIENT, np.maximum(CLIENT // 5, 1 * (CLIENT > 0))), Shape((0,), (), per_cluster=True), "Cluster 0 has one client"),
    (rows(CLIENT, CLIENT // 5, x=np.sign(CONSTANT)), BOTH, "The term 'x' is constant within every client"),
    (
        rows(CLIENT, CLIENT // 5, x=np.sign(CLIENT // 5 - 1.5)),
        Shape((0,), (0, 1)),
        "The term 'x' is constant within every cluster",
    ),
    (rows(CLIENT, CLIENT // 5, y=2.0 * CONSTANT), Shape((0,), (0,)), "The terms fit the response exactly"),
    (rows(CLIENT, CLIENT // 5, y=CONSTANT[6 * (CLIENT // 5)]), Shape((), (0,)), "The terms fit the response exactly"),
    (
        rows(np.arange(80) // 2, np.arange(80) // 20, x=np.tile([-1.0, 1.0], 40)),
        Shape((0, 1), ()),
        "more varying terms than this data",
    ),
    (rows(ONE_ROW, ONE_ROW // 8, y=(ONE_ROW % 3 == 0) * 1.0, loss=Bernoulli()), Shape((0,), (0,)), "Every client has one row"),
    (
        rows(CLIENT, CLIENT // 5, y=(CLIENT % 2) * 1.0, loss=Bernoulli()),
        Shape((0,), (0,)),
        "No client has rows of both classes",
    ),
    (
        rows(CLIENT, CLIENT // 5, x=(np.arange(120) % 2) * 1.0, y=(np.arange(120) % 2) * 1.0),
        Shape((0,), ()),
        "separate the classes of all rows",
    ),
]


@pytest.mark.parametrize(("data", "shape", "begins"), REFUSED, ids=range(len(REFUSED)))
def test_errors_of_identification_are_those_in_memory(data, shape, begins):
    classes = set(np.unique(data.y)) == {0.0, 1.0}
    loss = Bernoulli() if classes else Gaussian()
    network = Sharded.of(data, loss, random_owner(data, 7))
    said = []
    for fit in (lambda: estimate(in_memory(data, loss), shape), lambda: estimate(network, shape)):
        with pytest.raises(DataError, match=begins) as caught:
            fit()
        said.append(str(caught.value))
    assert said[0] == said[1]


# Specifications


NAMED = {"client": "client", "cluster": "cluster"}


@pytest.mark.parametrize(
    ("family", "asked"),
    [
        ("gaussian", {}),
        ("gaussian", {"penalty": "ml", "covariance": "full"}),
        ("gaussian", {"tests": False, "vary": {"client": ["1"], "cluster": ["1", "x"]}}),
        ("gaussian", {"james_stein": True}),
        ("gaussian", {"james_stein": True, "per_cluster": True}),
        ("gaussian", {"gamma": 2.0, "lam": 1.0}),
        ("gaussian", {"gamma": {0: 1.0, 1: 2.0, 2: 0.5, 3: 4.0}, "alpha": 0.3}),
        ("bernoulli", {"vary": ["1"]}),
        ("poisson", {"vary": ["1"], "tests": False}),
        ("poisson", {"gamma": [1.0, 2.0, 3.0, 4.0]}),
    ],
)
def test_a_specification_gives_the_fit_in_memory(family, asked):
    data, spec = table(8, family, weighted=False), Spec(family, **NAMED, **asked)
    whole = learn(InMemory.of(data, spec.loss), resolve(spec))
    network = Sharded.of(data, spec.loss, random_owner(data, 8))
    across = learn(network, resolve(spec))
    for ours, theirs in ((across.fit.w, whole.fit.w), (across.fit.wbar, whole.fit.wbar), (network.gathered(), whole.fit.theta)):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-8)
    assert (across.penalty is None) == (whole.penalty is None)
    if whole.learned is not None:
        assert across.fit.convergence.exchanges == network.exchanges
        for one, two in zip(across.learned.components.tests, whole.learned.components.tests, strict=True):
            assert one.statistic == pytest.approx(two.statistic, abs=1e-7)


@pytest.mark.parametrize(
    ("asked", "error", "sentence"),
    [
        (
            {"baseline": "single-model"},
            SolverError,
            "baseline='single-model' is not supported across sites; leave it out",
        ),
        ({"penalty": "cv"}, SolverError, "penalty='cv' is not supported across sites"),
        ({"gamma": np.ones(24)}, PenaltyError, "Across sites gamma is one number, or one for each cluster"),
        ({"gamma": dict.fromkeys(range(24), 1.0)}, PenaltyError, "Across sites gamma is one number"),
    ],
)
def test_errors_for_what_is_not_supported_across_sites(asked, error, sentence):
    data = table(8, "gaussian")
    with pytest.raises(error, match=sentence) as caught:
        learn(Sharded.of(data, Gaussian(), random_owner(data, 8)), resolve(Spec(**NAMED, **asked)))
    assert len(str(caught.value)) < 260
    assert str(caught.value).endswith(".")


def test_radon_takes_few_exchanges():
    """The number of exchanges of the example, so that a change that needs more is noticed."""
    homes = load_radon()
    X = np.column_stack([np.ones(len(homes)), homes["floor"].to_numpy()])
    data = GroupedData.from_arrays(X, homes["log_radon"], homes["county"], homes["state"], terms=["Intercept", "floor"])
    fit, learned = estimate(in_memory(data, Gaussian()), BOTH)
    network = Sharded.of(data, Gaussian(), random_owner(data, 9, 4))
    across = estimate(network, BOTH)
    assert_same(network, across, fit, learned, 1e-10)
    assert across[0].convergence.exchanges == network.exchanges <= 40
