"""The check of Laplace's approximation against dense integration and lme4, and the models that it reports as failed."""

from __future__ import annotations

import itertools
import json
import warnings

import numpy as np
import polars as pl
import pytest
from scipy import integrate
from scipy.special import expit, logsumexp

from covey import GroupedData, HierarchicalClassifier, HierarchicalPoissonRegressor
from covey.errors import ConvergenceWarning
from covey.losses import loss_of
from covey.variance.components import Components
from covey.variance.estimate import criterion_for, estimate
from covey.variance.identify import survey
from covey.variance.parameters import Shape
from covey.variance.quadrature import _ClusterIntegrals, error_at_mode
from covey.variance.rules import Rule
from tests.networks import Sharded, in_memory
from tests.variance.test_across import random_owner, table


def criterion_at(data, family, shape, client_sd, cluster_sd=0.0):
    """The criterion of some rows, and a point with these standard deviations."""
    criterion = criterion_for(survey(in_memory(data, loss_of(family)), shape, check=False), shape, reml=False)
    return criterion, criterion.start(client_sd, cluster_sd)


def dense_log_likelihood(criterion, x, data, phi, points=61, factors=(1.0, 1.0)):
    """By a tensor grid over all effects of a client, inside one over all effects of its cluster. Constants are left out.

    ``factors`` multiply the standard deviations of clients and clusters.
    """
    back = criterion.order.inverse
    roots = []
    for S, by in zip(criterion.covariances(x), factors, strict=True):
        values, vectors = np.linalg.eigh(S[0][np.ix_(back, back)])
        roots.append(by * np.sqrt(phi) * (vectors * np.sqrt(np.maximum(values, 0)))[:, values > 1e-12])
    grids = [_grid(root, points) for root in roots]
    centres = criterion.wbar(x)[back] + grids[1][0]
    total, loss, tree = 0.0, criterion.network.loss, data.hierarchy
    for j in range(data.n_clusters):
        inside = np.zeros(len(centres))
        for i in range(tree.cluster_ptr[j], tree.cluster_ptr[j + 1]):
            rows = slice(data.client_ptr[i], data.client_ptr[i + 1])
            margin = (centres @ data.X[rows].T)[:, None] + (grids[0][0] @ data.X[rows].T)[None]
            margin += 0.0 if data.offset is None else data.offset[rows]
            y = np.broadcast_to(data.y[rows], margin.shape)
            values = loss.values(margin.ravel(), y.ravel()).reshape(margin.shape)
            values = values @ (np.ones(values.shape[2]) if data.weights is None else data.weights[rows])
            inside += logsumexp(grids[0][1] - values / phi, axis=1)
        total += logsumexp(grids[1][1] + inside)
    return total


def _grid(root, points):
    """Effects ``(n, d)`` on an even grid of 8 standard deviations to either side, and the logs of their weights."""
    r, z = root.shape[1], np.linspace(-8, 8, points)
    nodes = np.stack(np.meshgrid(*[z] * r), axis=-1).reshape(-1, r) if r else np.zeros((1, 0))
    log_weight = -0.5 * (nodes**2).sum(axis=1)
    return nodes @ root.T, log_weight - logsumexp(log_weight)


def dense_laplace(criterion, x):
    """Laplace's log-likelihood without constants, as the dense computation leaves them out, and the upper levels."""
    here = criterion.evaluate(x)
    volume = here.value - criterion.constant
    loss, likelihood = criterion.network.loss, criterion.likelihood
    least, phi = loss.profile(likelihood.objective, likelihood.weight, likelihood.perfect)
    return -0.5 * (volume - 2 * least) - likelihood.objective / phi, here.top


@pytest.mark.parametrize("family", ["bernoulli", "poisson", "gamma"])
@pytest.mark.parametrize(
    ("shape", "points"),
    [(Shape((0,), ()), 161), (Shape((0,), (0,)), 161), (Shape((0, 1), (), "full"), 81), (Shape((), (0, 1)), 81)],
    ids=["clients", "nested", "two terms", "clusters only"],
)
def test_the_error_equals_that_of_dense_integration(family, shape, points):
    data = table(3, family, clusters=3, clients=4, rows=4)
    criterion, x = criterion_at(data, family, shape, 0.8, 0.6)
    laplace, top = dense_laplace(criterion, x)
    truth = dense_log_likelihood(criterion, x, data, top.dispersion, points) - laplace
    quick, careful = (_ClusterIntegrals(criterion, x, top, careful=care).estimates for care in (False, True))
    assert abs(truth) > (0.05 if family == "bernoulli" else 3e-3)
    assert careful[0] == pytest.approx([truth, 0.0], abs=3e-5)
    assert quick[0] == pytest.approx([truth, 0.0], abs=0.03 * abs(truth) + 6e-4 * data.n_clients)
    for level, (growth, _) in enumerate(careful[1:]):
        ends = [np.where(np.arange(2) == level, by, 1.0) for by in (1.01, 1 / 1.01)]
        up, down = (dense_log_likelihood(criterion, x, data, top.dispersion, points, by) for by in ends)
        assert growth == pytest.approx((up - down) / (2 * np.log(1.01)), abs=1e-3)


def test_one_client_by_adaptive_integration():
    """scipy.integrate.quad on the integrals of single clients, with a standard deviation at which the approximation is poor."""
    rng = np.random.default_rng(0)
    client = np.repeat(np.arange(40), 2)
    y = (rng.random(80) < expit(4 * rng.normal(size=40)[client])).astype(float)
    data = GroupedData.from_arrays(np.ones((80, 1)), y, client, np.zeros(80))
    criterion, x = criterion_at(data, "bernoulli", Shape((0,), ()), 6.0)
    here, wbar = criterion.evaluate(x), criterion.wbar(x)[0]
    sd = float(np.sqrt(criterion.covariances(x)[0][0, 0, 0]))

    def likelihood(ones):
        def density(b):
            p = expit(wbar + sd * b)
            return p**ones * (1 - p) ** (2 - ones) * np.exp(-(b**2) / 2) / np.sqrt(2 * np.pi)

        return integrate.quad(density, -12, 12, limit=500, epsabs=1e-14)[0]

    truth = sum(np.log(likelihood(ones)) for ones in np.bincount(client, y))
    error = _ClusterIntegrals(criterion, x, here.top, careful=True).estimates[0][0]
    assert -0.5 * here.value + error == pytest.approx(truth, abs=0.02)
    assert abs(error) > 0.5


def test_three_terms_by_importance_sampling():
    """Against a tensor grid, within four standard errors by the jackknife."""
    data = table(4, "bernoulli", clusters=4, clients=15, rows=5)
    criterion, x = criterion_at(data, "bernoulli", Shape((0, 1, 2), ()), 1.0)
    laplace, top = dense_laplace(criterion, x)
    truth = dense_log_likelihood(criterion, x, data, 1.0, 21) - laplace
    error, standard_error = error_at_mode(criterion, x, top)[0]
    assert 0.0 < standard_error < 0.25 * abs(truth)
    assert abs(error - truth) < 4 * standard_error


def binary_rows():
    """The rows of the reference values below."""
    rng = np.random.default_rng(5)
    i = np.repeat(np.arange(30), 4)
    x = rng.normal(size=len(i)).round(3)
    margin = 0.5 + 0.7 * x + 1.5 * rng.normal(size=30)[i]
    return pl.DataFrame({"y": (rng.random(len(i)) < 1 / (1 + np.exp(-margin))).astype(int), "x": x, "i": i})


def test_the_error_equals_that_of_glmer():
    """lme4 1.1-31: glmer(y ~ x + (1 | i), binomial), optimizer bobyqa, rhoend 1e-9, tolPwrss 1e-12.

    logLik is -71.02424602. The deviance function of nAGQ = 25 at the same parameters gives -70.62460540.
    """
    model = HierarchicalClassifier(formula="y ~ x + (1 | i)", tests=False).fit(binary_rows())
    components = model.components_
    assert components.log_likelihood == pytest.approx(-71.02424602, abs=1e-6)
    assert components.approximation.error == pytest.approx(-70.62460540 + 71.02424602, abs=2e-3)
    assert components.approximation.standard_error == 0.0
    assert model.convergence_.converged
    assert "0.4 (quadrature)" in str(model.summary())
    again = Components.from_json(json.loads(json.dumps(components.to_json())))
    assert again.approximation == components.approximation
    earlier = {name: value for name, value in components.to_json().items() if name != "approximation"}
    assert Components.from_json(earlier).approximation is None


@pytest.mark.parametrize("shape", [Shape((0,), (0,)), Shape((0, 1, 2), (0, 1)), Shape((1,), (0, 1, 2))])
def test_several_nodes_give_the_error_of_one(shape):
    data = table(8, "poisson", clusters=5, clients=6)
    one = estimate(in_memory(data, loss_of("poisson")), shape)[1].components.approximation
    across = estimate(Sharded.of(data, loss_of("poisson"), random_owner(data, 1)), shape)[1].components.approximation
    assert across.error == pytest.approx(one.error, rel=1e-5, abs=1e-8)
    assert across.standard_error == pytest.approx(one.standard_error, rel=1e-4, abs=1e-8)


def test_a_sample_of_many_clusters_is_scaled_up():
    data = table(2, "poisson", clusters=150, clients=3, rows=3, weighted=False)
    criterion, x = criterion_at(data, "poisson", Shape((0,), (0,)), 0.7, 0.7)
    top = criterion.evaluate(x).top
    criterion.network.exchanges = 1
    sampled = error_at_mode(criterion, x, top)[0]
    criterion.network.exchanges = 10**6
    whole = error_at_mode(criterion, x, top)[0]
    assert whole[1] == 0.0 < sampled[1]
    assert abs(sampled[0] - whole[0]) < 4 * sampled[1]


def test_a_sample_doubles_until_the_decision_is_clear():
    data = table(2, "poisson", clusters=150, clients=3, rows=3, weighted=False)
    criterion, x = criterion_at(data, "poisson", Shape((0,), (0,)), 0.7, 0.7)
    top = criterion.evaluate(x).top
    criterion.network.exchanges = 1
    first, *_ = error_at_mode(criterion, x, top)
    criterion.network.exchanges = 1
    limit, seen = 0.3 * first[1], []
    last, *_ = error_at_mode(criterion, x, top, lambda total, *_: seen.append(total[1]) or total[1] > limit)
    assert 0.0 < last[1] <= limit < min(seen[:-1])
    criterion.network.exchanges = 1
    whole, *growth = error_at_mode(criterion, x, top, lambda *_: True)
    assert whole[1] == growth[0][1] == growth[1][1] == 0.0
    assert abs(last[0] - whole[0]) < 4 * last[1]


@pytest.mark.parametrize("r", [1, 2])
def test_the_rough_rule_is_exact_to_degree_5(r):
    rule, exact = Rule.rough(r), Rule.over(r, 0)
    for powers in itertools.product(range(6), repeat=r):
        if sum(powers) <= 5:
            means = [np.exp(each.log_weight) @ (each.z**powers).prod(axis=1) for each in (rule, exact)]
            assert means[0] == pytest.approx(means[1], abs=1e-12)


# Models


def failed(model, frame):
    """Fit, and check what a failure says."""
    with pytest.warns(ConvergenceWarning, match="Laplace's approximation fails"):
        model.fit(frame)
    components = model.components_
    assert components.approximation.failed
    assert not model.convergence_.converged
    assert components.tests == ()
    note = components.notes[-1]
    assert f"{components.log_likelihood:.1f}" in note
    assert f"{components.log_likelihood + components.approximation.error:.1f}" in note
    assert "gamma=" in note
    assert "fewer terms" in note
    return components


@pytest.mark.parametrize(("clients", "rows"), [(1000, 2), (500, 4)])
def test_three_ones_in_2000_rows(clients, rows):
    """The approximation claims a log-likelihood far above that of any model; the best one is about -19."""
    i = np.repeat(np.arange(clients), rows)
    y = np.zeros(2000, dtype=int)
    y[[0, 1, rows]] = 1
    components = failed(HierarchicalClassifier(formula="y ~ 1 + (1 | i)"), pl.DataFrame({"y": y, "i": i}))
    assert components.approximation.error < -20
    assert np.isnan(components.client.sd_error).all()


def families(seed, clients, rows, client_sd, cluster_sd, mean=0.0):
    """Classes of rows, of clients in clusters of ten."""
    rng = np.random.default_rng(seed)
    i = np.repeat(np.arange(clients), rows)
    x = rng.normal(size=len(i))
    effects = client_sd * rng.normal(size=clients) + cluster_sd * rng.normal(size=clients // 10)[np.arange(clients) // 10]
    y = (rng.random(len(i)) < expit(mean + 0.5 * x + effects[i])).astype(int)
    return pl.DataFrame({"y": y, "x": x, "i": i, "g": i // 10})


def test_a_runaway_variance_ends_early():
    """Nearly all families have rows of one class, as in data on health care in Guatemala (guPrenat of R's mlmRev)."""
    components = failed(HierarchicalClassifier(formula="y ~ x + (1 | g/i)"), families(2, 800, 2, 8.0, 2.0, 4.0))
    assert components.approximation.error < -10
    assert components.client.sd[0, 0] > 10


def test_a_variance_without_bound_ends_early():
    """A standard deviation of the log-odds above 20 is a failure, even if the approximation is close there."""
    components = failed(HierarchicalClassifier(formula="y ~ x + (1 | g/i)"), families(1, 800, 2, 15.0, 4.0, 3.0))
    assert components.client.sd[0, 0] > 20


def test_a_large_bias_is_a_failure():
    """Clients with one or two rows: the standard deviation of clients is 3, Laplace's estimate less than two thirds of it."""
    frame = families(3, 1500, 2, 3.0, 0.7)
    rng = np.random.default_rng(0)
    frame = frame.filter(pl.Series((np.arange(len(frame)) % 2 == 0) | (rng.random(len(frame)) < 0.35)))
    components = failed(HierarchicalClassifier(formula="y ~ x + (1 | g/i)"), frame)
    assert components.client.sd[0, 0] < 2.0
    assert components.approximation.bias[0] > 0.4
    assert components.approximation.error > 2


@pytest.mark.parametrize(
    ("rows", "client_sd", "cluster_sd", "mean"),
    [(3, 1.0, 0.5, 0.0), (10, 2.5, 1.0, 1.0), (6, 0.2, 1.5, -2.0), (12, 3.5, 1.0, 0.0)],
)
def test_sound_fits_get_no_warning(rows, client_sd, cluster_sd, mean):
    frame = families(7, 200, rows, client_sd, cluster_sd, mean)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        model = HierarchicalClassifier(formula="y ~ x + (1 | g/i)", tests=False).fit(frame)
    assert model.convergence_.converged
    assert not model.components_.approximation.failed


def test_counts_get_no_warning():
    rng = np.random.default_rng(2)
    i = np.repeat(np.arange(200), 3)
    x = rng.normal(size=len(i))
    y = rng.poisson(np.exp(0.2 * x + rng.normal(size=200)[i] + 0.3 * rng.normal(size=200)[i] * x))
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        model = HierarchicalPoissonRegressor(formula="y ~ x + (1 + x | i)").fit(pl.DataFrame({"y": y, "x": x, "i": i}))
    assert abs(model.components_.approximation.bias[0]) < 0.1
