"""Estimates against lme4 on real and simulated data, and cases where other software fails."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey import GroupedData
from covey.datasets import simulate
from covey.errors import ConvergenceWarning
from covey.losses import Bernoulli, Gaussian, Poisson
from covey.variance.estimate import estimate, search
from covey.variance.linear_likelihood import LinearCriterion
from covey.variance.parameters import Shape
from tests.conftest import seeds
from tests.networks import in_memory, surveyed
from tests.variance.dense import linear_log_likelihood, slopes

LOSSES = {"gaussian": Gaussian(), "bernoulli": Bernoulli(), "poisson": Poisson()}


@dataclass(frozen=True)
class Reference:
    """Results of lme4: standard deviations by term, ``coef()`` of some clients and ``ranef()`` of some clusters."""

    log_likelihood: float
    wbar: list[float]
    errors: list[float]
    client: dict[str, float]
    cluster: dict[str, float]
    residual: float | None
    correlation: tuple[float, float] | None = None
    coefficients: dict[int, tuple[float, float]] = field(default_factory=dict)
    above: dict[str, float] = field(default_factory=dict)


# lmer and glmer fits of the bundled survey, the reference that the project was given (lme4, version not recorded there), with
# ``lr`` for log_radon and ``hi`` for radon >= 4; clients are counties, by their FIPS code, and clusters are states.
RADON = {
    # lr ~ floor + (1 | state/county)
    "intercepts_reml": Reference(
        -16039.06733528,
        wbar=[0.9407173429, -0.7124578653],
        errors=[0.1600238781, 0.0231985379],
        client={"Intercept": 0.3662750346},
        cluster={"Intercept": 0.4712503732},
        residual=0.9051387151,
        coefficients={
            4001: (0.8170422396, -0.7124578653),
            4009: (0.7746401398, -0.7124578653),
            4015: (0.7378501201, -0.7124578653),
        },
        above={"AZ": -0.3325892674, "MN": 0.4531181097, "WI": -0.1624126984},
    ),
    # lr ~ floor + (1 | state/county)
    "intercepts_ml": Reference(
        -16035.27668959,
        wbar=[0.9419781883, -0.7126539847],
        errors=[0.1506903957, 0.02319533147],
        client={"Intercept": 0.3662426334},
        cluster={"Intercept": 0.4427171856},
        residual=0.9051026671,
        coefficients={
            4001: (0.8168612959, -0.7126539847),
            4009: (0.7741257109, -0.7126539847),
            4015: (0.737030879, -0.7126539847),
        },
        above={"AZ": -0.3314228435, "MN": 0.4511305595, "WI": -0.1622908151},
    ),
    # lr ~ floor + (1 + floor || state) + (1 + floor || state:county)
    "diagonal_reml": Reference(
        -16026.32396524,
        wbar=[0.9353874978, -0.7232236298],
        errors=[0.1684924276, 0.04287715075],
        client={"floor": 0.19274477, "Intercept": 0.3638602754},
        cluster={"floor": 0.09018569054, "Intercept": 0.4960279626},
        residual=0.901307808,
        coefficients={
            4001: (0.868345915, -0.7931624659),
            4009: (0.8126425876, -0.7576665059),
            4015: (0.7724034679, -0.7452506416),
        },
        above={"AZ": -0.3970753396, "MN": 0.4535915545, "WI": -0.1280101908},
    ),
    # lr ~ floor + (1 + floor | state) + (1 + floor | state:county)
    "full_reml": Reference(
        -16021.18150681,
        wbar=[0.9183593371, -0.7011806377],
        errors=[0.1792889817, 0.04974319504],
        client={"Intercept": 0.3781541871, "floor": 0.2116488557},
        cluster={"Intercept": 0.5283995047, "floor": 0.1203279607},
        residual=0.9010811464,
        correlation=(-0.3022783749, -0.9421040108),
        coefficients={
            4001: (0.8746224074, -0.7787820666),
            4009: (0.7883612283, -0.7237232959),
            4015: (0.7480005112, -0.7126842811),
        },
        above={"AZ": -0.4458201663, "MN": 0.485842801, "WI": -0.1241436891},
    ),
    # hi ~ floor + (1|state/county)
    "binomial_laplace": Reference(
        -6140.233694783,
        wbar=[-0.9199672407, -1.294900643],
        errors=[0.3477166133, 0.06817494511],
        client={"Intercept": 0.8081927656},
        cluster={"Intercept": 1.012393671},
        residual=None,
        coefficients={
            4001: (-0.7485620481, -1.294900643),
            4009: (-1.393077053, -1.294900643),
            4015: (-1.638146877, -1.294900643),
        },
        above={"AZ": -0.781949631, "MN": 1.02401622, "WI": -0.323024681},
    ),
}

INTERCEPTS, SLOPES = Shape((0,), (0,)), Shape((0, 1), (0, 1))
FULL = replace(SLOPES, client_kind="full", cluster_kind="full")


def check(components, fit, covariance, reference):
    """Compare within the tolerances that the project promises."""
    laplace = components.method == "Laplace"
    ahead = components.log_likelihood - reference.log_likelihood
    assert -1e-4 < ahead < (1e-2 if laplace else 1e-4)
    np.testing.assert_allclose(fit.wbar, reference.wbar, rtol=1e-2 if laplace else 1e-4)
    np.testing.assert_allclose(np.sqrt(np.diag(covariance)), reference.errors, rtol=1e-2 if laplace else 1e-4)
    for level in ("client", "cluster"):
        found, expected = getattr(components, level), getattr(reference, level)
        assert dict(zip(found.terms, found.sd[0].tolist(), strict=True)) == pytest.approx(expected, rel=1e-3, abs=1e-6)
    if reference.residual is not None:
        assert np.sqrt(components.residual) == pytest.approx(reference.residual, rel=1e-4)
    if reference.correlation is not None:
        correlations = components.client.correlation[0, 0, 1], components.cluster.correlation[0, 0, 1]
        assert correlations == pytest.approx(reference.correlation, abs=1e-3)
    assert fit.convergence.converged


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("intercepts_reml", INTERCEPTS),
        ("intercepts_ml", INTERCEPTS),
        ("diagonal_reml", SLOPES),
        ("full_reml", FULL),
        ("binomial_laplace", INTERCEPTS),
    ],
)
def test_radon_as_in_lme4(homes, name, shape):
    X = np.column_stack([np.ones(len(homes)), homes["floor"]])
    loss = Bernoulli() if name == "binomial_laplace" else Gaussian()
    y = homes["radon"] >= 4 if name == "binomial_laplace" else homes["log_radon"]
    data = GroupedData.from_arrays(X, y, homes["fips"], homes["state"], terms=("Intercept", "floor"))
    fit, learned = estimate(in_memory(data, loss), shape, reml=name.endswith("reml"))
    reference = RADON[name]
    check(learned.components, fit, learned.covariance, reference)
    assert not [note for note in learned.components.notes if "one class" not in note]
    tree = data.hierarchy
    at = {fips: i for i, fips in enumerate(tree.clients.tolist())}
    # In lme4 the coefficients of a county do not include the effect of its state.
    own = fit.theta - fit.w[tree.parent] + fit.wbar
    for fips, coefficients in reference.coefficients.items():
        np.testing.assert_allclose(own[at[fips]], coefficients, atol=1e-3)
    states = dict(zip(tree.clusters.tolist(), (fit.w - fit.wbar)[:, 0], strict=True))
    for state, effect in reference.above.items():
        assert states[state] == pytest.approx(effect, abs=1e-3)


# Data that the tests draw themselves. The numbers are those of lme4 1.1.31 (R 4.2.2) with
#
#   lmerControl(optimizer = "bobyqa", optCtrl = list(rhobeg = 0.2, rhoend = 1e-10, maxfun = 1e6))
#   glmerControl(optimizer = "bobyqa", optCtrl = list(rhobeg = 2e-3, rhoend = 1e-10, maxfun = 1e6), tolPwrss = 1e-13)
#
# on the tables of ``drawn(name)`` written as csv; the formula stands beside each.


def drawn(name):
    """Columns client, cluster, y, x0 (ones), x1; ``w`` weights and ``o`` an offset where there are any."""
    if name == "gaussian":
        settings = {"clusters": 8, "clients": 6, "rows": 7, "wbar": [1.0, -0.5], "cluster_sd": 0.8, "client_sd": 0.5}
        table = simulate(d=2, intercept=True, equal_rows=False, seed=11, **settings).frame()
        return table.with_columns(w=np.random.default_rng(5).uniform(0.2, 3.0, len(table)))
    if name in ("correlated", "nothing"):
        seed = 3 if name == "correlated" else 2
        return simulate(
            clusters=1, clients=12, rows=6, d=2, client_sd=0.0, cluster_sd=0.0, intercept=True, seed=seed
        ).frame()  # fmt: skip
    if name == "bernoulli":
        settings = {"clusters": 12, "clients": 6, "rows": 12, "wbar": [-0.5, 1.0], "cluster_sd": 0.8, "client_sd": 0.6}
        return simulate("bernoulli", d=2, intercept=True, equal_rows=False, seed=3, **settings).frame()
    settings = {"clusters": 8, "clients": 5, "rows": 5, "wbar": [0.5, 0.3], "cluster_sd": 0.5, "client_sd": 0.3}
    counts, rng = simulate("poisson", d=2, intercept=True, seed=4, **settings), np.random.default_rng(6)
    o = np.log(rng.uniform(0.5, 4.0, len(counts.y)))
    y = rng.poisson(np.exp((counts.X * counts.theta[counts.client]).sum(axis=1) + o)).astype(float)
    return counts.frame().with_columns(y=pl.Series(y), o=pl.Series(o))


def grouped(table, weights=None, offset=None):
    X = table.select("x0", "x1").to_numpy()
    extra = {"weights": None if weights is None else table[weights], "offset": None if offset is None else table[offset]}
    return GroupedData.from_arrays(X, table["y"], table["client"], table["cluster"], terms=("Intercept", "x1"), **extra)


MIXED = Shape((0,), (0, 1))
SIMULATED = [
    # y ~ x1 + (x1 | cluster/client)
    ("gaussian", FULL, True, {}, Reference(
        -587.4289839758, [1.410228302550, -0.639617893334], [0.225163548493, 0.151454651090],
        {"Intercept": 0.638695078749, "x1": 0.547748328928}, {"Intercept": 0.551291276384, "x1": 0.310687846797},
        0.950093278043, (-0.102224013237, -1.0))),
    # y ~ x1 + (x1 | cluster/client), weights = w, REML = FALSE
    ("gaussian", FULL, False, {"weights": "w"}, Reference(
        -628.94076963496, [1.369997194736, -0.628216651243], [0.223350266495, 0.147592730298],
        {"Intercept": 0.669835453103, "x1": 0.552950054324}, {"Intercept": 0.533480360546, "x1": 0.289461261021},
        1.210179098642, (-0.200533738400, -1.0))),
    # y ~ x1 + (x1 || cluster) + (1 | client)
    ("gaussian", MIXED, True, {}, Reference(
        -606.38344642247, [1.39246456569, -0.68282432375], [0.223164102648, 0.156335614905],
        {"Intercept": 0.582540892404}, {"Intercept": 0.552582243202, "x1": 0.410471010440}, 1.064136213448)),
    # y ~ x1 + (x1 | client), singular
    ("correlated", Shape((0, 1), (), "full"), True, {}, Reference(
        -97.573916636608, [0.00779043580167, 0.02212943365614], [0.137653195795, 0.132527683247],
        {"Intercept": 0.314510116928, "x1": 0.241938377564}, {}, 0.865456088338)),
    # y ~ x1 + (1 | client), singular
    ("nothing", Shape((0,), ()), True, {}, Reference(
        -110.92325707797, [0.0157454109952, 0.2991351499201], [0.131133759282, 0.135429661277],
        {"Intercept": 0.0}, {}, 1.11078764027)),
    # y ~ x1 + (1 | cluster/client), family = binomial
    ("bernoulli", INTERCEPTS, False, {}, Reference(
        -484.06329599268, [-0.413412264336, 0.755683123435], [0.2631451137246, 0.0905368010314],
        {"Intercept": 0.543359408306}, {"Intercept": 0.815073940053}, None)),
    # y ~ x1 + (x1 || cluster) + (1 | client), family = binomial
    ("bernoulli", MIXED, False, {}, Reference(
        -477.11090109047, [-0.488185419427, 0.847027369702], [0.273111429886, 0.204484636021],
        {"Intercept": 0.572777716108}, {"Intercept": 0.839916414436, "x1": 0.591774255840}, None)),
    # y ~ x1 + (1 | cluster/client) + offset(o), family = poisson
    ("poisson", INTERCEPTS, False, {"offset": "o"}, Reference(
        -456.51292661795, [0.209089698645, 0.600289262573], [0.1971763652511, 0.0471510382071],
        {"Intercept": 0.446567494306}, {"Intercept": 0.502265622479}, None)),
    # y ~ x1 + (x1 | cluster) + (1 | client) + offset(o), family = poisson
    ("poisson", replace(MIXED, cluster_kind="full"), False, {"offset": "o"}, Reference(
        -420.31906215086, [0.223077717474, 0.617306722761], [0.185724931478, 0.160084980713],
        {"Intercept": 0.3951216657858}, {"Intercept": 0.4743284368191, "x1": 0.4274279637459}, None)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "shape", "reml", "columns", "reference"), SIMULATED)
def test_simulated_as_in_lme4(name, shape, reml, columns, reference):
    loss = LOSSES.get(name, Gaussian())
    fit, learned = estimate(in_memory(grouped(drawn(name), **columns), loss), shape, reml=reml)
    check(learned.components, fit, learned.covariance, reference)


# Cases where other software fails


def test_clusters_without_variation_are_noted_and_the_fit_converges():
    drawn = simulate(clusters=8, clients=6, rows=10, d=1, client_sd=1.0, cluster_sd=0.0, seed=1)
    fit, learned = estimate(in_memory(drawn.data, Gaussian()), Shape((0,), (0,)))
    assert fit.convergence.converged
    assert learned.components.notes == ("singular: no variation between clusters",)
    assert learned.components.cluster.sd == 0
    np.testing.assert_allclose(fit.w, np.broadcast_to(fit.wbar, fit.w.shape), rtol=1e-12)
    without = estimate(in_memory(drawn.data, Gaussian()), Shape((0,), ()))[1].components
    assert learned.components.log_likelihood == pytest.approx(without.log_likelihood, abs=1e-7)


def test_clients_without_variation_are_noted_and_equal_their_clusters():
    drawn = simulate(clusters=8, clients=6, rows=10, d=1, client_sd=0.0, cluster_sd=1.0, seed=1)
    fit, learned = estimate(in_memory(drawn.data, Gaussian()), Shape((0,), (0,)))
    assert learned.components.notes == ("singular: no variation between clients",)
    np.testing.assert_allclose(fit.theta, fit.w[drawn.data.hierarchy.parent], rtol=1e-12)


@pytest.mark.parametrize("name", ["gaussian", "correlated", "bernoulli", "poisson"])
@pytest.mark.parametrize("start", [0.01, 5.0])
def test_the_start_does_not_matter(name, start, monkeypatch):
    shape = FULL if name != "correlated" else Shape((0, 1), (), "full")
    data, loss = grouped(drawn(name)), LOSSES.get(name, Gaussian())
    usual = estimate(in_memory(data, loss), shape)
    monkeypatch.setattr(sys.modules["covey.variance.estimate"], "START", start)
    fit, learned = estimate(in_memory(data, loss), shape)
    assert fit.convergence.converged
    assert learned.components.log_likelihood == pytest.approx(usual[1].components.log_likelihood, abs=2e-6)
    assert learned.components.notes == usual[1].components.notes
    np.testing.assert_allclose(fit.theta, usual[0].theta, atol=2e-3)


@pytest.mark.parametrize("kind", ["diagonal", "full"])
@pytest.mark.parametrize(("of_x", "of_y"), [(1e6, 1.0), (1e-6, 1.0), (1.0, 1e4), (1e-3, 1e4)])
def test_units_do_not_matter(kind, of_x, of_y):
    """The likelihood of ``of_y y`` is that of ``y`` by its Jacobian; REML's has the global model's units in it as well."""
    shape, table = replace(SLOPES, client_kind=kind, cluster_kind=kind), drawn("gaussian")
    other = table.with_columns(x1=of_x * pl.col("x1"), y=of_y * pl.col("y"))
    (fit, one), (refit, two) = (estimate(in_memory(grouped(each), Gaussian()), shape) for each in (table, other))
    rows, d = len(table), 2
    jacobian = -(rows - d) * np.log(of_y) - np.log(of_x)
    assert two.components.log_likelihood == pytest.approx(one.components.log_likelihood + jacobian, abs=1e-5)
    assert fit.convergence.converged
    assert refit.convergence.converged
    np.testing.assert_allclose(refit.theta * [1.0, of_x] / of_y, fit.theta, atol=1e-3)
    np.testing.assert_allclose(two.components.client.sd * [1.0, of_x] / of_y, one.components.client.sd, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", ["bernoulli", "poisson"])
@pytest.mark.parametrize("of_x", [1e6, 1e-6])
def test_units_do_not_matter_for_counts_and_classes(family, of_x):
    table = drawn(family)
    other = table.with_columns(x1=of_x * pl.col("x1"))
    (fit, one), (refit, two) = (estimate(in_memory(grouped(each), LOSSES[family]), SLOPES) for each in (table, other))
    assert two.components.log_likelihood == pytest.approx(one.components.log_likelihood, abs=1e-5)
    assert fit.convergence.converged
    assert refit.convergence.converged
    np.testing.assert_allclose(refit.theta * [1.0, of_x], fit.theta, atol=1e-3)


@settings(max_examples=15)
@given(seeds, st.sampled_from(["isotropic", "diagonal", "full"]), st.booleans())
def test_a_converged_fit_has_a_zero_gradient(seed, kind, per_cluster):
    """By differences of the value: a small move of any parameter does not lower the criterion."""
    rng = np.random.default_rng(seed)
    sds = rng.choice([0.0, 0.3, 1.0, 5.0], size=2)
    many = {"clusters": int(rng.integers(2, 7)), "clients": int(rng.integers(2, 7)), "rows": int(rng.integers(3, 9))}
    data = simulate(**many, d=2, client_sd=sds[0], cluster_sd=sds[1], intercept=True, seed=rng).data
    shape = Shape((0, 1), (0,), kind, kind, per_cluster)
    criterion = LinearCriterion(surveyed(data, Gaussian()), shape, reml=True)
    best = search(criterion)
    assert best.converged
    slope = slopes(lambda x: criterion.value_and_gradient(x)[0], best.x, 1e-4)
    assert np.abs(slope).max() < 5e-3
    for step in (1e-3, -1e-3):
        for a in range(len(best.x)):
            x = best.x.copy()
            x[a] += step * max(1.0, abs(x[a]))
            assert criterion.value_and_gradient(x)[0] > best.value - 1e-6


def test_a_search_that_is_cut_short_is_not_converged(monkeypatch):
    """There is a warning and a note."""
    module = sys.modules["covey.variance.search"]
    monkeypatch.setattr(module, "_quasi_newton", lambda criterion, z, _: module.Optimum(
        z, *criterion([z])[0], np.eye(len(z)), np.inf))  # fmt: skip
    monkeypatch.setattr(module, "_descend", lambda *_: None)
    with pytest.warns(ConvergenceWarning, match="did not converge"):
        fit, learned = estimate(in_memory(grouped(drawn("gaussian")), Gaussian()), SLOPES)
    assert not fit.convergence.converged
    assert "did not converge" in learned.components.notes[-1]


def separated():
    """All rows with ``z`` are of one class, so its coefficient has no finite estimate."""
    rng, client = np.random.default_rng(0), np.repeat(np.arange(20), 6)
    z = (rng.normal(size=120) > 1).astype(float)
    y = np.where(z == 1, 1.0, rng.integers(0, 2, size=120))
    return GroupedData.from_arrays(np.column_stack([np.ones(120), z]), y, client, client // 5, terms=("Intercept", "z"))


def test_a_coefficient_without_finite_estimate_is_an_error():
    with pytest.raises(ValueError, match=r"The fixed effect 'z' separates the classes.*leave it out"):
        estimate(in_memory(separated(), Bernoulli()), INTERCEPTS)


# Invariance


@settings(max_examples=10)
@given(seeds)
def test_the_order_and_names_of_clients_do_not_matter(seed):
    rng, table = np.random.default_rng(seed), drawn("gaussian")
    names = rng.permutation(table["client"].max() + 1)
    other = table.with_columns(client=pl.Series(names[table["client"].to_numpy()])).sample(
        fraction=1.0, shuffle=True, seed=seed
    )
    (fit, one), (refit, two) = (estimate(in_memory(grouped(each), Gaussian()), SLOPES) for each in (table, other))
    assert one.components.log_likelihood == pytest.approx(two.components.log_likelihood, abs=1e-6)
    np.testing.assert_allclose(one.components.client.sd, two.components.client.sd, rtol=1e-3)
    np.testing.assert_allclose(fit.wbar, refit.wbar, atol=1e-4)


def test_the_order_of_terms_does_not_matter():
    table = drawn("gaussian")
    data = grouped(table)
    turned = GroupedData.from_arrays(
        data.X[:, ::-1].copy(), data.y, data.client_of_row, data.hierarchy.parent[data.client_of_row]
    )
    (fit, one), (refit, two) = (
        estimate(in_memory(data, Gaussian()), MIXED),
        estimate(in_memory(turned, Gaussian()), Shape((1,), (1, 0))),
    )
    assert one.components.log_likelihood == pytest.approx(two.components.log_likelihood, abs=1e-6)
    np.testing.assert_allclose(fit.theta, refit.theta[:, ::-1], atol=1e-4)
    assert two.components.cluster.terms == ("x0", "x1")
    np.testing.assert_allclose(one.components.cluster.sd[:, ::-1], two.components.cluster.sd, rtol=1e-3)


def test_per_cluster_covariances_maximise_the_density_of_all_rows():
    rng, client = np.random.default_rng(2), np.repeat(np.arange(15), 4)
    sd = np.array([0.5, 1.0, 3.0])[client // 5]
    y = sd * rng.normal(size=15)[client] + rng.normal(size=60)
    data = GroupedData.from_arrays(np.ones((60, 1)), y, client, client // 5)
    components = estimate(in_memory(data, Gaussian()), Shape((0,), (), per_cluster=True))[1].components
    common = estimate(in_memory(data, Gaussian()), Shape((0,), ()))[1].components
    assert components.parameters == common.parameters + 2
    assert components.log_likelihood > common.log_likelihood + 1
    relative, none = components.client.covariance / components.residual, np.zeros((1, 1, 1))
    best = linear_log_likelihood(data, relative, none, reml=True)[0]
    assert components.log_likelihood == pytest.approx(best, abs=1e-8)
    for _ in range(12):
        away = relative * np.exp(0.1 * rng.normal(size=(3, 1, 1)))
        assert linear_log_likelihood(data, away, none, reml=True)[0] < best


def test_numbers_of_parameters_and_rows_aic_and_bic():
    components = estimate(in_memory(grouped(drawn("gaussian")), Gaussian()), FULL)[1].components
    assert (components.parameters, components.rows) == (2 + 3 + 3 + 1, len(drawn("gaussian")))
    assert components.aic == pytest.approx(2 * 9 - 2 * components.log_likelihood)
    assert components.bic == pytest.approx(np.log(components.rows) * 9 - 2 * components.log_likelihood)
    assert sum(components.shares) == pytest.approx(1.0)


@pytest.mark.filterwarnings("ignore::covey.errors.ConvergenceWarning")  # the last digits of the criterion itself are rounding
@pytest.mark.parametrize("noise", [1e-4, 1e-5, 1e-6])
def test_a_tiny_residual_keeps_its_digits(noise):
    """In sums of squares about the pooled fit its digits would be lost."""
    rng = np.random.default_rng(0)
    client = np.repeat(np.arange(48), 6)
    x, own, above, error = rng.normal(size=288), rng.normal(size=48), rng.normal(size=8), rng.normal(size=288)
    X = np.column_stack([np.ones(288), x])
    y = own[client] + above[client // 6] + 0.5 * x + noise * error
    data = GroupedData.from_arrays(X, y, client, client // 6, terms=["Intercept", "x"])
    components = estimate(in_memory(data, Gaussian()), Shape((0,), (0,)))[1].components
    inside = y - segment_mean(y, client) - 0.5 * (x - segment_mean(x, client))
    slope = (x - segment_mean(x, client)) @ inside / ((x - segment_mean(x, client)) ** 2).sum()
    left = inside - slope * (x - segment_mean(x, client))
    assert np.sqrt(components.residual) == pytest.approx(np.sqrt(left @ left / (288 - 48 - 1)), rel=1e-3)


def segment_mean(values, client):
    return (np.bincount(client, values) / np.bincount(client))[client]
