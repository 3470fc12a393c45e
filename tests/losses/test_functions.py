"""User-defined losses: Huber and the squared hinge, in everything that uses a loss."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from scipy import optimize
from sklearn.base import clone
from sklearn.svm import LinearSVC

from covey import GroupedData, HierarchicalClassifier, HierarchicalRegressor, Penalty, load, plan
from covey.errors import ConvergenceWarning, CoveyError, ModelError, PenaltyError, SolverError
from covey.federation.simulate import simulate_sites
from covey.losses import FAMILIES, Gaussian, from_functions, loss_of
from covey.problem.problem import Spec
from covey.solvers import minimise
from tests.conftest import random_problem
from tests.fits import fit_table

DELTA = 1.345


@pytest.fixture
def registry():
    """Restore the registry after the test."""
    before = dict(FAMILIES)
    yield
    FAMILIES.clear()
    FAMILIES.update(before)


@pytest.fixture
def huber(registry):
    return from_functions(
        "huber",
        value=lambda m, y: np.where(np.abs(m - y) <= DELTA, 0.5 * (m - y) ** 2, DELTA * np.abs(m - y) - 0.5 * DELTA**2),
        slope=lambda m, y: np.clip(m - y, -DELTA, DELTA),
        curvature=lambda m, y: (np.abs(m - y) <= DELTA).astype(float),
        bounds=(0.0, 1.0),
        start=lambda y: y,
    )


def room(m, y):
    """Distance by which a margin misses 1 on the side of its class."""
    return np.maximum(1.0 - (2 * y - 1) * m, 0.0)


@pytest.fixture
def hinge(registry):
    return from_functions(
        "squared-hinge",
        value=lambda m, y: room(m, y) ** 2,
        slope=lambda m, y: -2 * (2 * y - 1) * room(m, y),
        curvature=lambda m, y: 2.0 * (room(m, y) > 0),
        bounds=(0.0, 2.0),
        two_classes=True,
    )


def by_scipy(problem, loss):
    """The minimiser of the multi-task form in (theta, w, wbar), by BFGS on values and slopes in plain numpy."""
    data, penalty, tree = problem.data, problem.penalty, problem.data.hierarchy
    n, k, d = tree.n_clients, tree.n_clusters, data.n_terms
    weights = np.ones(data.n_rows) if data.weights is None else data.weights

    def both(flat):
        theta, w, wbar = np.split(flat.reshape(-1, d), [n, n + k])
        margin, down, up = data.margin(theta), theta - w[tree.parent], w - wbar
        value = (weights * loss.functions["value"](margin, data.y)).sum()
        value += 0.5 * (penalty.gamma[:, None] * down**2).sum() + 0.5 * (penalty.lam[:, None] * up**2).sum()
        rows = (weights * loss.functions["slope"](margin, data.y))[:, None] * data.X
        force, above = penalty.gamma[:, None] * down, penalty.lam[:, None] * up
        g = np.add.reduceat(rows, data.client_ptr[:-1]) + force
        gw = above - np.array([force[tree.parent == j].sum(axis=0) for j in range(k)])
        return value, np.concatenate([g, gw, -above.sum(axis=0)[None]]).ravel()

    start = np.zeros((n + k + 1) * d)
    best = optimize.minimize(both, start, jac=True, method="BFGS", options={"gtol": 1e-9, "maxiter": 10_000})
    return best.fun, best.x.reshape(-1, d)


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_huber_has_the_minimiser_of_scipy(huber, seed):
    problem = random_problem(seed, weighted=seed % 2 == 0)
    problem.y[::5] += 20.0
    value, best = by_scipy(problem, huber)
    fit = minimise(problem.data, huber, problem.penalty, solver="newton", tol=1e-9)
    assert fit.convergence.converged
    assert fit.convergence.objective == pytest.approx(value, rel=1e-9)
    np.testing.assert_allclose(np.concatenate([fit.theta, fit.w, fit.wbar[None]]), best, atol=1e-5)


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_squared_hinge_has_the_minimiser_of_scipy(hinge, seed):
    problem = random_problem(seed, "bernoulli", weighted=seed % 2 == 0)
    value, best = by_scipy(problem, hinge)
    fit = minimise(problem.data, hinge, problem.penalty, solver="newton", tol=1e-9)
    assert fit.convergence.converged
    assert fit.convergence.objective == pytest.approx(value, rel=1e-9)
    np.testing.assert_allclose(np.concatenate([fit.theta, fit.w, fit.wbar[None]]), best, atol=1e-4)


def test_squared_hinge_of_one_client_is_a_linear_support_vector_machine(hinge):
    rng = np.random.default_rng(1)
    X, y = rng.normal(size=(80, 3)), (rng.random(80) < 0.5).astype(float)
    data = GroupedData.from_arrays(X, y)
    fit = minimise(data, replace(hinge, ridge=2.0), Penalty.of(data.hierarchy), solver="newton", tol=1e-10)
    machine = LinearSVC(C=0.5, loss="squared_hinge", fit_intercept=False, tol=1e-12, max_iter=100_000).fit(X, y)
    np.testing.assert_allclose(fit.theta[0], machine.coef_[0], atol=1e-5)


def test_huber_of_one_client_resists_outliers_as_scikit_learn_does(huber):
    """HuberRegressor estimates a scale; covey minimises the same loss in units of that scale."""
    from sklearn.linear_model import HuberRegressor

    rng = np.random.default_rng(2)
    X, noise = rng.normal(size=(200, 2)), rng.standard_t(2, size=200)
    y = X @ [1.0, -2.0] + 0.3 * noise
    theirs = HuberRegressor(epsilon=DELTA, alpha=0.0, fit_intercept=False, tol=1e-10, max_iter=10_000).fit(X, y)
    data = GroupedData.from_arrays(X / theirs.scale_, y / theirs.scale_)
    fit = minimise(data, huber, Penalty.of(data.hierarchy), solver="newton", tol=1e-10)
    np.testing.assert_allclose(fit.wbar, theirs.coef_, atol=1e-5)


def clients(two_classes=False):
    rng = np.random.default_rng(3)
    client = np.repeat(np.arange(8), 6)
    X = np.column_stack([np.ones(48), rng.normal(size=48)])
    y = X @ [0.5, 1.0] + rng.standard_t(2, size=48)
    return GroupedData.from_arrays(X, (y > 0).astype(float) if two_classes else y, client, client // 4)


@pytest.mark.parametrize("solver", ["l2gd", "one_coin", "al2sgd_plus"])
@pytest.mark.parametrize("name", ["huber", "squared-hinge"])
def test_randomised_algorithms_reach_the_minimum(huber, hinge, solver, name):
    data = clients(two_classes=name == "squared-hinge")
    loss, penalty = loss_of(name, "mean", 0.3), Penalty.of(data.hierarchy, gamma=0.5, lam=0.5)
    best = minimise(data, loss, penalty, solver="newton")
    settings = {"tol": 1e-8} if solver == "al2sgd_plus" else {"steps": "switching", "tol": 3e-3}
    fit = minimise(data, loss, penalty, solver=solver, max_iter=60_000, **settings)
    assert fit.convergence.converged, fit.convergence.message
    np.testing.assert_allclose(fit.theta, best.theta, atol=1e-3 if solver == "al2sgd_plus" else 0.15)


@pytest.mark.parametrize("solver", ["l2gd", "one_coin", "al2sgd_plus"])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_numpy_path_takes_the_steps_of_the_compiled_one(registry, solver, weighted):
    """A compiled loss and the same loss from functions take the same steps with the same random choices."""
    own = loss_of("bernoulli")
    from_functions("logit", own.values, own.slopes, own.curvatures, own.curvature, mean=own.mean, two_classes=True)
    problem = random_problem(4, "bernoulli", weighted=weighted)
    data, penalty = problem.data, problem.penalty
    settings = {"max_iter": 300, "tol": 1e-12, "mu": 0.3, "seed": 5}
    with pytest.warns(ConvergenceWarning):
        one, two = (
            minimise(data, loss_of(name, "mean", 0.3), penalty, solver=solver, **settings) for name in ("bernoulli", "logit")
        )
    assert not FAMILIES["logit"]().compiled
    np.testing.assert_allclose(one.theta, two.theta, rtol=1e-9, atol=1e-12)


def test_a_user_defined_quadratic_is_solved_exactly(registry):
    square = from_functions(
        "square", lambda m, y: (m - y) ** 2 / 2, lambda m, y: m - y, lambda m, y: np.ones_like(m), (1.0, 1.0)
    )
    problem = random_problem(2)
    fit = HierarchicalRegressor(loss=square, gamma=2.0, fit_intercept=False).fit(problem.X, problem.y, client=problem.client)
    same = HierarchicalRegressor(gamma=2.0, fit_intercept=False).fit(problem.X, problem.y, client=problem.client)
    assert fit.convergence_.solver == "sweep"
    np.testing.assert_allclose(fit.coef_, same.coef_, rtol=1e-10)
    data, penalty = problem.data, problem.penalty
    with pytest.warns(ConvergenceWarning):
        runs = [
            minimise(data, loss, penalty, solver="l2gd", steps="switching", max_iter=200, tol=1e-9)
            for loss in (square, Gaussian())
        ]
    np.testing.assert_allclose(runs[0].theta, runs[1].theta, rtol=1e-6, atol=1e-8)


def frame(two_classes=False):
    data = clients(two_classes)
    columns = {"y": data.y, "x": data.X[:, 1], "client": data.client_of_row, "cluster": data.client_of_row // 4}
    return pl.DataFrame(columns)


NAMES = {"client": "client", "cluster": "cluster", "formula": "y ~ x", "gamma": 1.0, "lam": 1.0}


@pytest.mark.parametrize("given", ["name", "loss"])
def test_a_regressor(huber, tmp_path, given):
    rows = frame()
    model = HierarchicalRegressor(loss="huber" if given == "name" else huber, **NAMES).fit(rows)
    fit = minimise(clients(), huber, Penalty.of(clients().hierarchy, gamma=1.0, lam=1.0), solver="newton")
    np.testing.assert_allclose(model.coef_, fit.theta, atol=1e-6)
    assert "huber" in str(model)
    assert clone(model).get_params()["loss"] == model.loss
    again = load(model.save(tmp_path / "model"))
    assert (again.predict(rows) == model.predict(rows)).all()
    assert again.loss == "huber"
    assert "huber" in (tmp_path / "model" / "model.json").read_text()


def test_a_classifier(hinge, tmp_path):
    rows = frame(two_classes=True)
    model = HierarchicalClassifier(loss=hinge, **NAMES).fit(rows)
    assert set(model.predict(rows)) == {0.0, 1.0}
    assert model.score(rows, rows["y"]) > 0.6
    with pytest.raises(SolverError, match="mean="):
        model.predict_proba(rows)
    again = load(model.save(tmp_path / "model"))
    assert isinstance(again, HierarchicalClassifier)
    assert (again.decision_function(rows) == model.decision_function(rows)).all()


def test_a_model_cannot_be_loaded_without_its_loss(huber, tmp_path):
    path = HierarchicalRegressor(loss=huber, **NAMES).fit(frame()).save(tmp_path / "model")
    del FAMILIES["huber"]
    with pytest.raises(ModelError, match="'huber'") as caught:
        load(path)
    assert "from_functions" in str(caught.value)
    assert "before loading" in str(caught.value)


def test_cross_validation_and_baselines(huber):
    for settings in ({"penalty": "cv"}, {"baseline": "locally-trained"}, {"baseline": "single-model"}):
        model = HierarchicalRegressor(loss=huber, client="client", formula="y ~ x", **settings).fit(frame())
        assert np.isfinite(model.coef_).all()


def test_the_plan(huber):
    found = plan(frame(), family=huber, **NAMES, ridge=0.2)
    assert pytest.approx(plan(frame(), family="gaussian", **NAMES, ridge=0.2).known.L, rel=1e-3) == found.known.L
    assert "newton" in found.frame["solver"].to_list()


def test_sites_that_have_registered_the_loss(huber):
    rows = frame()
    spec = Spec(family="huber", **NAMES)
    assert simulate_sites(rows, spec, 2).difference(fit_table(rows, spec)) < 1e-7
    del FAMILIES["huber"]
    with pytest.raises(CoveyError, match="from_functions"):
        simulate_sites(rows, spec, 2)


def test_invalid_losses_and_settings_are_refused(huber, hinge):
    with pytest.raises(PenaltyError, match=r"'huber'.*no likelihood"):
        HierarchicalRegressor(loss=huber, client="client", formula="y ~ x").fit(frame())
    with pytest.raises(SolverError, match="comes with covey"):
        from_functions("gaussian", None, None, None, (0.0, 1.0))
    for bounds in ((-1.0, 1.0), (2.0, 1.0), (0.0, 0.0), (0.0, np.nan)):
        with pytest.raises(SolverError, match="bounds"):
            from_functions("odd", None, None, None, bounds)
    with pytest.raises(SolverError, match="two classes"):
        HierarchicalRegressor(loss=hinge, **NAMES).fit(frame())
    with pytest.raises(SolverError, match="numbers"):
        HierarchicalClassifier(loss=huber, **NAMES).fit(frame(two_classes=True))
    with pytest.raises(CoveyError, match="0 and 1"):
        hinge.check(np.array([0.0, 2.0]), lambda row: f"row {row}")
    with pytest.raises(CoveyError, match="from_functions"):
        HierarchicalRegressor(loss="tukey", **NAMES).fit(frame())
    scalar = from_functions("scalar", lambda m, y: 0.0, lambda m, y: m - y, lambda m, y: np.ones_like(m), (1.0, 1.0))
    with pytest.raises(SolverError, match="value of 'scalar'"):
        scalar.value(clients(), np.zeros((8, 2)))
    for part in (lambda: huber.thirds(np.zeros(1), np.zeros(1)), lambda: huber.residual(np.zeros(1))):
        with pytest.raises(SolverError, match="'huber'"):
            part()
    with pytest.raises(SolverError, match="'huber'"):
        huber.draw(np.zeros(1), np.random.default_rng(0))
    with pytest.raises(SolverError, match="noise"):
        huber.response_interval(np.zeros(1), np.ones(1), np.ones(1), 0.95, np.ones(1))


def test_a_loss_may_be_registered_again(huber):
    again = from_functions("huber", lambda m, y: (m - y) ** 2, lambda m, y: 2 * (m - y), lambda m, y: 2.0 + 0 * m, (2.0, 2.0))
    assert again.quadratic
    assert FAMILIES["huber"] is type(again)


def test_newton_moves_where_every_row_is_flat(huber):
    """Outliers move the least-squares start so far away that no row has curvature there."""
    rng = np.random.default_rng(0)
    client = np.repeat(np.arange(30), 20)
    X = np.column_stack([np.ones(600), rng.normal(size=600)])
    y = 1000 + X @ [0.0, 2.0] + rng.normal(size=600)
    y[rng.random(600) < 0.2] += 5000.0
    data = GroupedData.from_arrays(X, y, client, client // 5)
    assert not huber.functions["curvature"](np.full(600, y.mean()), y).any()
    fit = minimise(data, huber, Penalty.of(data.hierarchy, gamma=3.0, lam=2.0), solver="newton")
    assert fit.convergence.converged
    np.testing.assert_allclose(fit.wbar, [1000.0, 2.0], atol=0.6)
