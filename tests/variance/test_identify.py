"""Variances that are not identifiable are an error that names the term and the fix; others are fitted."""

from __future__ import annotations

import numpy as np
import pytest

from covey import GroupedData
from covey.errors import CoveyError, DataError
from covey.losses import Bernoulli, Gaussian, Poisson
from covey.variance.estimate import estimate
from covey.variance.parameters import Shape
from tests.networks import in_memory

BOTH = Shape((0, 1), (0, 1))
LOSSES = [Gaussian(), Bernoulli(), Poisson()]


def table(clusters=4, clients=5, rows=6, *, x=None, y=None, seed=0, loss=LOSSES[0], terms=("Intercept", "x")):
    """An intercept and a column, ``x`` and ``y`` given as functions of the client, cluster and rng."""
    rng = np.random.default_rng(seed)
    client = np.repeat(np.arange(clusters * clients), rows)
    cluster = client // clients
    column = rng.normal(size=len(client)) if x is None else np.asarray(x(client, cluster, rng), dtype=float)
    X = np.column_stack([np.ones(len(client)), column])
    margin = 0.5 * rng.normal(size=len(client))[client] + 0.5 * rng.normal(size=len(client))[cluster]
    response = loss.draw(margin, rng) if y is None else y(X, client, rng)
    return GroupedData.from_arrays(X, response, client, cluster, terms=terms)


def error_of(data, shape, loss=LOSSES[0]):
    """The error message, checked for the form that all messages have."""
    with pytest.raises(DataError) as caught:
        estimate(in_memory(data, loss), shape)
    sentence = str(caught.value)
    assert isinstance(caught.value, CoveyError)
    assert len(sentence) < 260
    assert sentence.endswith(".")
    assert sentence.isascii()
    return sentence


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_one_client_in_each_cluster(loss):
    sentence = error_of(table(clusters=20, clients=1, loss=loss), BOTH, loss)
    assert sentence.startswith("Every cluster has one client")
    assert "leave out cluster=" in sentence


def test_one_client_in_each_cluster_is_allowed_if_one_level_varies():
    data = table(clusters=20, clients=1)
    below, above = (estimate(in_memory(data, Gaussian()), shape)[1].components for shape in (Shape((0,), ()), Shape((), (0,))))
    assert below.log_likelihood == pytest.approx(above.log_likelihood, abs=1e-7)
    assert below.client.sd == pytest.approx(above.cluster.sd, rel=1e-4)


def test_one_row_for_each_client():
    sentence = error_of(table(clusters=10, clients=8, rows=1), Shape((0,), (0,)))
    assert sentence.startswith("Every client has one row")
    assert "let no term vary by client" in sentence


def test_one_row_for_each_client_is_allowed_if_only_clusters_vary():
    assert estimate(in_memory(table(clusters=10, clients=8, rows=1), Gaussian()), Shape((), (0,)))[0].convergence.converged


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_a_term_constant_within_every_client(loss):
    """Two values of opposite sign do not identify a variance: one would have to differ in size."""
    data = table(x=lambda client, cluster, rng: np.where(client % 2, 1.0, -1.0), loss=loss)
    sentence = error_of(data, BOTH, loss)
    assert sentence.startswith("The term 'x' is constant within every client")
    assert "leave it out of the terms that vary by client (vary=, or its bar)" in sentence


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_a_term_constant_within_every_cluster(loss):
    data = table(clusters=8, x=lambda client, cluster, rng: cluster % 2, loss=loss)
    sentence = error_of(data, Shape((0,), (0, 1), cluster_kind="full"), loss)
    assert sentence.startswith("The term 'x' is constant within every cluster")
    assert "leave it out of the terms that vary by cluster" in sentence


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_the_fix_for_a_constant_term_works(loss):
    data = table(clusters=8, x=lambda client, cluster, rng: cluster % 2, loss=loss)
    assert estimate(in_memory(data, loss), Shape((0,), (0,)))[0].convergence.converged


def test_no_residual():
    data = table(y=lambda X, client, rng: X @ [1.0, 2.0] + rng.normal(size=20)[client])
    sentence = error_of(data, Shape((0,), (0,)))
    assert sentence.startswith("The terms fit the response exactly")
    assert "Check whether the response is constant" in sentence


@pytest.mark.parametrize(
    "y",
    [lambda X, client, rng: X[:, 1].copy(), lambda X, client, rng: np.full(len(X), 5.0), lambda X, client, rng: X @ [3.0, 2.0]],
    ids=["a term", "a constant", "a combination"],
)
def test_a_response_that_is_a_combination_of_terms(y):
    for shape in (BOTH, Shape((0,), (0,)), Shape((), (0,))):
        sentence = error_of(table(y=y), shape)
        assert sentence.startswith("The terms fit the response exactly")
        assert "Check whether the response is constant" in sentence


# If only the intercept varies, the residual is not zero although each client's rows are on a line. lme4 fits this too.
def test_exact_lines_of_different_slopes_have_a_residual_if_slopes_are_common():
    data = table(y=lambda X, client, rng: rng.normal(size=20)[client] * X[:, 1])
    components = estimate(in_memory(data, Gaussian()), Shape((0,), ()))[1].components
    assert components.residual > 0.1


def test_no_residual_within_clusters_if_only_clusters_vary():
    data = table(y=lambda X, client, rng: X @ [1.0, 2.0] + rng.normal(size=4)[client // 5])
    assert error_of(data, Shape((), (0,))).startswith("The terms fit the response exactly")


def test_a_response_with_a_large_mean_is_not_taken_for_a_constant():
    small = table(y=lambda X, client, rng: rng.normal(size=20)[client] + rng.normal(size=len(X)))
    large = GroupedData.from_arrays(small.X, small.y + 1e8, small.client_of_row, terms=small.terms)
    usual = GroupedData.from_arrays(small.X, small.y, small.client_of_row, terms=small.terms)
    one, two = (estimate(in_memory(data, Gaussian()), Shape((0,), ()))[1].components for data in (usual, large))
    assert two.client.sd == pytest.approx(one.client.sd, rel=1e-4)


def test_a_full_covariance_with_too_few_rows():
    data = table(clusters=8, rows=2)
    sentence = error_of(data, Shape((0, 1), (), "full"))
    assert sentence.startswith("There are 80 rows for 80 random coefficients of clients")
    assert sentence.endswith("let fewer terms vary by client, or set covariance='diagonal'.")
    assert estimate(in_memory(data, Gaussian()), Shape((0, 1), ()))[0].convergence.converged


def test_classes_with_one_row_for_each_client():
    """One class per client does not identify the variance of clients. One count does, by overdispersion."""
    data = table(clusters=10, clients=8, rows=1, loss=Bernoulli())
    assert error_of(data, Shape((0,), (0,)), Bernoulli()).startswith("Every client has one row")
    counts = table(clusters=10, clients=8, rows=1, loss=Poisson())
    assert estimate(in_memory(counts, Poisson()), Shape((0,), (0,)))[0].convergence.converged


def test_as_many_terms_as_rows():
    data = table(clusters=1, clients=2, rows=2)
    square = GroupedData.from_arrays(np.c_[data.X, [1.0, 0, 0, 0], [0, 1.0, 0, 0]], data.y, data.client_of_row)
    sentence = error_of(square, Shape((0,), ()))
    assert sentence.startswith("There are 4 rows for 4 global coefficients;")
    assert "add rows, or leave out terms" in sentence


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_terms_that_are_combinations_of_each_other(loss):
    data = table(loss=loss)
    twice = GroupedData.from_arrays(
        np.c_[data.X, 1 - 3 * data.X[:, 1]], data.y, data.client_of_row, terms=("Intercept", "x", "again")
    )
    fit, learned = estimate(in_memory(twice, loss), Shape((0,), ()))
    usual = GroupedData.from_arrays(data.X, data.y, data.client_of_row, terms=data.terms)
    plain, expected = estimate(in_memory(usual, loss), Shape((0,), ()))
    assert learned.components.zero == ("again",)
    assert learned.components.notes[0].startswith("dropped: 'again'")
    assert learned.components.log_likelihood == pytest.approx(expected.components.log_likelihood, abs=1e-6)
    assert fit.wbar == pytest.approx([*plain.wbar, 0.0], abs=1e-4)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_a_column_of_zeros(loss):
    fit, learned = estimate(in_memory(table(x=lambda client, cluster, rng: 0.0 * client, loss=loss), loss), BOTH)
    assert learned.components.zero == ("x",)
    assert learned.components.client.terms == learned.components.cluster.terms == ("Intercept",)
    assert fit.wbar[1] == 0.0


def test_more_varying_terms_than_the_data_identify():
    """Two rows with x at -1 and 1 have the covariances 11', xx' and I, and the first two add up to twice the third."""
    data = table(rows=2, x=lambda client, cluster, rng: np.tile([-1.0, 1.0], len(client) // 2))
    sentence = error_of(data, Shape((0, 1), ()))
    assert sentence.startswith("There are more varying terms than this data can identify: the variances of ")
    assert all(name in sentence for name in ("the residual", "Intercept between clients", "x between clients"))
    assert sentence.endswith("let fewer terms vary (vary=, or the bar), or add rows.")


def test_the_same_terms_are_identifiable_with_a_third_row():
    data = table(clusters=8, rows=3, x=lambda client, cluster, rng: np.tile([-1.0, 1.0, 0.5], len(client) // 3))
    assert estimate(in_memory(data, Gaussian()), Shape((0, 1), ()))[0].convergence.converged


def test_the_units_of_a_column_do_not_matter():
    for scale in (1e-8, 1e8):
        data = table(x=lambda client, cluster, rng, scale=scale: scale * rng.normal(size=len(client)))
        assert estimate(in_memory(data, Gaussian()), Shape((0, 1), (0,)))[0].convergence.converged


def test_a_column_with_a_large_mean_is_not_taken_for_a_constant():
    data = table(x=lambda client, cluster, rng: 2000.0 + rng.normal(size=len(client)))
    assert estimate(in_memory(data, Gaussian()), Shape((0,), (0,)))[0].convergence.converged


@pytest.mark.parametrize("shape", [Shape((0,), (0,)), Shape((), (0,))])
def test_clusters_with_dummies_among_the_common_terms(shape):
    rng = np.random.default_rng(0)
    cluster = np.repeat(np.arange(4), 30)
    X = np.column_stack([np.ones(120), *(cluster == j for j in (1, 2, 3))]).astype(float)
    data = GroupedData.from_arrays(X, rng.normal(size=120), np.arange(120) // 6, cluster, terms=["Intercept", "b", "c", "d"])
    sentence = error_of(data, shape)
    assert "coefficient of 'Intercept', so its variance between clusters is not identifiable" in sentence
    assert "leave the cluster column out of the fixed effects" in sentence


def test_a_constant_response_without_degrees_of_freedom_is_an_error():
    rng = np.random.default_rng(0)
    X = np.column_stack([np.ones(60), rng.normal(size=60)])
    data = GroupedData.from_arrays(X, np.ones(60), np.arange(60) // 2, np.arange(60) // 6, terms=["Intercept", "x"])
    assert error_of(data, Shape((0, 1), (0, 1))).startswith("The terms fit the response exactly")
