"""Added and removed clients: coefficients equal those of Henderson's equations for all rows."""

from __future__ import annotations

import hashlib
import json
import struct

import numpy as np
import polars as pl
import pytest

from covey import GroupedData, HierarchicalClassifier, HierarchicalPoissonRegressor, HierarchicalRegressor, load
from covey.datasets import simulate
from covey.model.batches import Batches
from tests.henderson import beside

DRAWN = simulate(clusters=5, clients=6, rows=6, d=2, wbar=0.5, client_sd=0.6, cluster_sd=0.9, equal_rows=False, seed=4)
RNG = np.random.default_rng(1)
ROWS = {
    "X": DRAWN.X,
    "y": DRAWN.y + 0.3,
    "client": DRAWN.client,
    "cluster": DRAWN.cluster,
    "sample_weight": RNG.uniform(0.3, 2.0, len(DRAWN.y)),
    "offset": RNG.normal(size=len(DRAWN.y)),
}
ONCE = np.arange(len(DRAWN.y)) % 3 > 0
KEPT = {
    "new clients in old clusters": DRAWN.client % 6 != 2,
    "new clients in a new cluster": DRAWN.cluster != 3,
    "more rows of known clients": ONCE,
    "all of these": (DRAWN.client % 6 != 2) & (DRAWN.cluster != 4) & ((DRAWN.client % 6 != 1) | ONCE),
}


def pick(rows, names=tuple(ROWS)):
    return {name: ROWS[name][rows] for name in names}


def fit(rows, **settings):
    return HierarchicalRegressor(tests=False, **settings).fit(**pick(rows))


def dense_of(model, rows):
    """Clients and clusters of the rows, in the order of their ids."""
    X = np.column_stack([np.ones(rows.sum()), ROWS["X"][rows]])
    clients, clusters = np.unique(ROWS["client"][rows]), np.unique(ROWS["cluster"][rows])
    by_id = replace_ids(model, clients, clusters)
    given = {"weights": ROWS["sample_weight"][rows], "offset": ROWS["offset"][rows]}
    return beside(by_id, X, ROWS["y"][rows], ROWS["client"][rows], ROWS["cluster"][rows], **given), clients, clusters


def replace_ids(model, clients, clusters):
    class Named:
        components_, terms_, clients_, clusters_ = model.components_, model.terms_, clients, clusters

    return Named


def assert_is_dense(model, rows):
    dense, clients, clusters = dense_of(model, rows)
    at = [int(np.flatnonzero(model.clients_ == i)[0]) for i in clients]
    up = [int(np.flatnonzero(model.clusters_ == j)[0]) for j in clusters]
    assert (len(at), len(up)) == (len(model.clients_), len(model.clusters_))
    posterior = model.model_.posterior
    for ours, theirs in (
        (model.global_coef_, dense.wbar),
        (model.cluster_coef_[up], dense.w),
        (model.coef_[at], dense.theta),
        (posterior.learned.covariance, dense.whole),
        (posterior.clusters[up], dense.clusters),
        (posterior.clients[at], dense.clients),
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-8)
    counts = np.array([(ROWS["client"][rows] == i).sum() for i in clients])
    np.testing.assert_array_equal(model.model_.rows[at], counts)


@pytest.mark.parametrize("settings", [{}, {"covariance": "full"}, {"vary": {"client": ["1"], "cluster": ["x0"]}}])
@pytest.mark.parametrize("case", KEPT)
def test_adding_is_exact(case, settings):
    kept = KEPT[case]
    before = fit(kept, **settings)
    after = before.update(**pick(~kept))
    assert_is_dense(after, np.ones(len(kept), dtype=bool))
    assert_is_dense(before, kept)  # which stays as it was


@pytest.mark.parametrize("gone", [[2, 8], [0], list(range(6, 12))])
def test_removing_is_exact(gone):
    model = fit(np.ones(len(DRAWN.y), dtype=bool)).remove_clients(gone)
    if len(gone) == 6:
        # A cluster without clients remains, with the global model.
        np.testing.assert_allclose(model.cluster_coef_[1], model.global_coef_, atol=1e-10)
        above = model.components_.cluster.embedded(model.terms_)[0]
        np.testing.assert_allclose(
            model.model_.posterior.clusters[1], model.model_.posterior.learned.covariance + above, atol=1e-10
        )
        dense, clients, _ = dense_of(model, ~np.isin(DRAWN.client, gone))
        assert model.clients_.tolist() == clients.tolist()
        np.testing.assert_allclose(model.coef_, dense.theta, atol=1e-8)
    else:
        assert_is_dense(model, ~np.isin(DRAWN.client, gone))


@pytest.mark.parametrize("gone", [[2, 8], list(range(24, 30)), list(range(6, 12))])
@pytest.mark.parametrize("per_cluster", [False, True])
def test_removing_and_adding_the_same_clients_changes_nothing(gone, per_cluster):
    everyone = np.ones(len(DRAWN.y), dtype=bool)
    model = fit(everyone, per_cluster=per_cluster, vary={"client": ["1"]})
    again = model.remove_clients(gone).add_clients(**pick(np.isin(DRAWN.client, gone)))
    order = np.argsort(again.clients_)  # within a cluster, clients that were added come last
    assert again.clients_[order].tolist() == model.clients_.tolist()
    np.testing.assert_allclose(again.coef_[order], model.coef_, atol=1e-9)
    for name in ("cluster_coef_", "global_coef_"):
        np.testing.assert_allclose(getattr(again, name), getattr(model, name), atol=1e-9)
    ours, theirs = again.model_.posterior, model.model_.posterior
    np.testing.assert_allclose(ours.clients[order], theirs.clients, atol=1e-9)
    np.testing.assert_allclose(ours.learned.covariance, theirs.learned.covariance, atol=1e-9)
    for name in ("clusters", "new_clients"):
        np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), atol=1e-9)


@pytest.mark.parametrize("cluster", [1, 4])
def test_a_cluster_without_clients_keeps_its_covariance(cluster):
    model = fit(np.ones(len(DRAWN.y), dtype=bool), per_cluster=True, vary={"client": ["1"]})
    fewer = model.remove_clients(np.unique(DRAWN.client[DRAWN.cluster == cluster]))
    own = model.components_.client.embedded(model.terms_)[cluster]
    new = fewer.model_.posterior.new_clients[cluster] - fewer.model_.posterior.clusters[cluster]
    np.testing.assert_allclose(new, own, atol=1e-9)


def test_the_order_of_clients_does_not_matter():
    kept = KEPT["all of these"]
    model, new = fit(kept), np.unique(DRAWN.client[~kept])
    at_once = model.update(**pick(~kept))
    one_by_one = model
    for client in new[::-1]:
        one_by_one = one_by_one.update(**pick(~kept & (DRAWN.client == client)))
    frames = [each.coef_frame().sort("client", "term").drop("cluster") for each in (at_once, one_by_one)]
    assert frames[0]["client"].equals(frames[1]["client"])
    for column in ("estimate", "std_error", "rows"):
        np.testing.assert_allclose(frames[0][column], frames[1][column], atol=1e-9)


def test_a_new_client_has_its_own_model_at_once():
    kept = KEPT["new clients in old clusters"]
    model = fit(kept)
    new = ~kept & (DRAWN.client == 2)
    ask = pick(new, ("X", "client", "cluster", "offset"))
    after = model.add_clients(**pick(new))
    assert (np.ptp(after.predict_interval(**ask), axis=1) < np.ptp(model.predict_interval(**ask), axis=1)).all()
    dense, clients, _ = dense_of(after, kept | new)
    X = np.column_stack([np.ones(new.sum()), DRAWN.X[new]])
    at = clients.tolist().index(2)
    np.testing.assert_allclose(after.predict(**ask), X @ dense.theta[at] + ask["offset"], atol=1e-8)
    own = after.model_.posterior.clients[after.clients_.tolist().index(2)]
    np.testing.assert_allclose(own, dense.clients[at], atol=1e-8)


def test_a_new_cluster_has_the_mean_of_per_cluster_covariances():
    kept = KEPT["new clients in a new cluster"]
    after = fit(kept, per_cluster=True, vary={"client": ["1"]}).add_clients(**pick(~kept))
    spread = after.model_.posterior.learned.client.shape * after.components_.residual
    at = after.model_.hierarchy.parent == after.clusters_.tolist().index(3)
    np.testing.assert_allclose(spread[at], np.broadcast_to(after.components_.client.embedded(after.terms_).mean(axis=0),
                                                          spread[at].shape))  # fmt: skip


@pytest.mark.parametrize("family", ["bernoulli", "poisson"])
def test_a_new_client_with_classes_or_counts_is_close_to_a_refit(family):
    drawn = simulate(family, clusters=8, clients=8, rows=25, d=2, wbar=0.3, client_sd=0.5, cluster_sd=0.5, seed=6)
    estimator = {"bernoulli": HierarchicalClassifier, "poisson": HierarchicalPoissonRegressor}[family]
    new = drawn.client % 8 == 3
    groups = {"client": drawn.client, "cluster": drawn.cluster}

    def part(rows):
        return {"X": drawn.X[rows], "y": drawn.y[rows], **{name: ids[rows] for name, ids in groups.items()}}

    model = estimator(fit_intercept=False, tests=False).fit(**part(~new))
    after = model.add_clients(**part(new))
    refit = mode(drawn.data, model)[after.clients_]
    at = after.clients_ % 8 == 3
    off = np.abs(after.coef_ - refit) / after.model_.posterior.standard_errors("client")
    print(f"{family}: new clients within {off[at].max():.3f} of a standard error of a refit, known ones {off[~at].max():.3f}")
    assert off.max() < 0.03
    ask = {name: ids[new] for name, ids in groups.items()}
    narrower = np.ptp(after.predict_interval(drawn.X[new], **ask), axis=1)
    assert (narrower < np.ptp(model.predict_interval(drawn.X[new], **ask), axis=1)).mean() > 0.9


def mode(data, model):
    """Clients' coefficients that minimise loss and penalties together, by plain Newton steps on the dense problem."""
    n, k, d = data.n_clients, data.n_clusters, data.n_terms
    parent, loss, found = data.hierarchy.parent, model.model_.spec.loss, model.components_
    S_client, S_cluster = (np.linalg.inv(level.embedded(model.terms_)[0]) for level in (found.client, found.cluster))
    K = np.zeros(((n + k + 1) * d,) * 2)
    for child, up, S in [
        *((i, n + parent[i], S_client) for i in range(n)),
        *((n + j, n + k, S_cluster) for j in range(k)),
    ]:
        a, b = slice(child * d, child * d + d), slice(up * d, up * d + d)
        K[a, a] += S
        K[b, b] += S
        K[a, b] -= S
        K[b, a] -= S
    u = np.tile(model.global_coef_, n + k + 1)
    for _ in range(300):
        here = loss.expand(data, u[: n * d].reshape(n, d))
        H, slope = K.copy(), K @ u
        for i in range(n):
            H[i * d : i * d + d, i * d : i * d + d] += here.hessian[i]
        slope[: n * d] += here.gradient.ravel()
        if np.abs(slope).max() < 1e-8:
            break
        u = u - np.linalg.solve(H, slope)
    assert np.abs(slope).max() < 1e-8
    return u[: n * d].reshape(n, d)


def table():
    drawn = simulate(clusters=4, clients=5, rows=8, d=1, client_sd=0.6, cluster_sd=0.9, seed=3)
    return drawn.frame()


@pytest.fixture(scope="module")
def named():
    return HierarchicalRegressor(formula="y ~ x0 + (1 | cluster/client)", tests=False).fit(table())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda rows: rows.drop("cluster"), "There is no column 'cluster'"),
        (lambda rows: rows.drop("client"), "There is no column 'client'"),
        (lambda rows: rows.drop("y"), "There is no column 'y'"),
        (lambda rows: rows.with_columns(client=pl.lit("a")), "client ids are text here"),
        (lambda rows: rows.with_columns(cluster=pl.lit("a")), "cluster ids are text here"),
        (lambda rows: rows.with_columns(client=pl.lit(None)), "no client id"),
        (lambda rows: rows.with_columns(y=pl.lit(np.nan)), "response is NaN"),
        (lambda rows: rows.with_columns(x0=pl.lit(np.inf)), "x0"),
        (lambda rows: rows[:0], "no rows"),
        # An id that is not a whole number must not be rounded to one.
        (lambda rows: rows.with_columns(client=pl.lit(7.5), cluster=pl.lit(1)), "client id 7.5 is not a whole number"),
        (lambda rows: rows.with_columns(client=pl.lit(99), cluster=pl.lit(1.5)), "cluster id 1.5 is not a whole number"),
    ],
)
def test_errors_of_wrong_new_rows(named, change, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        named.update(change(table()[:2]))
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")


def test_new_rows_of_a_client_are_in_its_cluster():
    model = HierarchicalRegressor(formula="y ~ x0", client="client", cluster="cluster", tests=False).fit(table())
    with pytest.raises(ValueError, match="Client 0 is in cluster 0 in the model but in 2"):
        model.add_clients(table()[:2].with_columns(cluster=pl.lit(2)))
    with pytest.raises(ValueError, match="need the ids of their clusters"):
        model.add_clients(table()[:2].drop("cluster"))


@pytest.mark.parametrize(
    ("clients", "sentence"),
    [
        ([99], "has no client 99"),
        (["a"], "client ids are text here"),
        (list(range(20)), "keep at least one"),
        ("a", "client ids are text here"),
    ],
)
def test_errors_of_wrong_clients_to_remove(named, clients, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        named.remove_clients(clients)
    assert "\n" not in str(caught.value)


def test_weights_by_position_equal_weights_by_name():
    stacked = np.column_stack([DRAWN.client, DRAWN.cluster, DRAWN.X, ROWS["sample_weight"]])
    kept = KEPT["new clients in old clusters"]
    by_position = HierarchicalRegressor(client=0, cluster=1, weights=4, tests=False).fit(stacked[kept], ROWS["y"][kept])
    by_position = by_position.add_clients(stacked[~kept], ROWS["y"][~kept])
    names = ("X", "y", "client", "cluster", "sample_weight")
    by_name = HierarchicalRegressor(tests=False).fit(**pick(kept, names)).add_clients(**pick(~kept, names))
    np.testing.assert_allclose(by_position.coef_, by_name.coef_, atol=1e-10)


@pytest.mark.parametrize("count", [0, 30, 1000, 10**6])
def test_counts_far_from_those_of_the_fit_converge(count):
    drawn = simulate("poisson", clusters=5, clients=5, rows=10, d=1, intercept=True, client_sd=0.4, cluster_sd=0.4, seed=1)
    given = {"client": drawn.client, "cluster": drawn.cluster}
    model = HierarchicalPoissonRegressor(fit_intercept=False, tests=False).fit(drawn.X, drawn.y, **given)
    after = model.add_clients(np.ones((3, 1)), [count] * 3, client=[99] * 3, cluster=[0] * 3)
    theta, w = after.coef_[after.clients_ == 99].item(), after.cluster_coef_[0].item()
    # At the mode the gradient of the loss balances the force of the cluster.
    tau2 = model.components_.client.sd[0, 0] ** 2
    assert 3 * (count - np.exp(theta)) == pytest.approx((theta - w) / tau2, rel=1e-6, abs=1e-6)


def test_an_unknown_class_is_an_error():
    drawn = simulate("bernoulli", clusters=4, clients=5, rows=12, d=1, client_sd=0.6, cluster_sd=0.9, seed=3)
    label = np.where(drawn.y > 0, "yes", "no")
    ask = {"client": drawn.client, "cluster": drawn.cluster}
    model = HierarchicalClassifier(tests=False).fit(drawn.X, label, **ask)
    with pytest.raises(ValueError, match="'maybe', which is neither of the model's classes 'no', 'yes'"):
        model.add_clients(drawn.X[:1], ["maybe"], client=[99], cluster=[0])
    assert len(model.add_clients(drawn.X[:1], ["yes"], client=[99], cluster=[0]).clients_) == 21


def test_a_model_whose_penalties_were_given_cannot_be_updated():
    given = HierarchicalRegressor(client="client", cluster="cluster", formula="y ~ x0", gamma=1.0).fit(table())
    for change in (lambda: given.add_clients(table()[:2]), lambda: given.update(table()), lambda: given.remove_clients([0])):
        with pytest.raises(ValueError, match=r"variance components.*fit all rows again") as caught:
            change()
        assert "interval" not in str(caught.value)


def test_an_updated_model_has_a_note(named):
    more = named.add_clients(table()[:2].with_columns(client=pl.lit(99)))
    assert "162 rows of 21 clients" in str(more)
    assert "160 rows of 20 clients" in str(named)


# Batches


def test_rows_are_not_added_twice(tmp_path):
    rows = table()
    first, second = rows[::2], rows[1::2]
    model = HierarchicalRegressor(formula="y ~ x0 + (1 | cluster/client)", tests=False).fit(first)
    updated = model.update(second)
    assert updated.model_.n_rows == 160
    few = first.filter(pl.col("client") < 3)
    for known in (model, updated, load(model.save(tmp_path / "model")), load(updated.save(tmp_path / "updated"))):
        for again in (first, first.sample(fraction=1.0, shuffle=True, seed=1), few, first.to_pandas()):
            with pytest.raises(ValueError, match=r"in the model already.*repeat=True"):
                known.update(again)
    with pytest.raises(ValueError, match="already"):
        load(tmp_path / "updated").update(second)
    assert model.update(first, repeat=True).model_.n_rows == 160
    assert model.update(few.with_columns(pl.col("y") + 1e-12)).model_.n_rows == 80 + len(few)
    assert model.update(pl.concat([few, second[:1]])).model_.n_rows == 81 + len(few)  # some rows are new


def test_rows_of_removed_clients_can_be_added_again(named):
    gone = named.remove_clients([0, 7])
    back = gone.update(table().filter(pl.col("client").is_in([0, 7])))
    assert back.model_.n_rows == named.model_.n_rows
    with pytest.raises(ValueError, match="already"):
        back.update(table())
    with pytest.raises(ValueError, match="already"):
        gone.update(table().filter(pl.col("client") == 1))


def test_new_clients_are_added_and_known_ones_updated(named):
    with pytest.raises(ValueError, match=r"has client .*0.* already.*use update"):
        named.add_clients(table()[:2])
    new = table()[:2].with_columns(client=pl.lit(99))
    np.testing.assert_array_equal(named.add_clients(new).coef_, named.update(new).coef_)
    with pytest.raises(ValueError, match="already"):
        named.add_clients(new).update(new)


def test_models_without_hashes_load_and_update(named, tmp_path):
    folder = named.save(tmp_path / "model")
    sums = pl.read_parquet(folder / "sums.parquet").drop("batches")
    sums.write_parquet(folder / "sums.parquet")
    document = json.loads((folder / "model.json").read_text())
    document["sha256"]["sums"] = hashlib.sha256((folder / "sums.parquet").read_bytes()).hexdigest()
    del document["dropped"], document["checksum"]
    (folder / "model.json").write_text(json.dumps(document))
    assert load(folder).update(table()).model_.n_rows == 320  # as before, nothing is known of the rows


def test_hashes_of_rows_are_those_of_plain_integers():
    data = GroupedData.from_arrays([[1.5, -0.0], [0.0, 2.0], [3.0, 4.0]], [1.0, 2.0, 3.0], [0, 0, 1], weights=[1.0, 2.0, 1.0])
    zero = GroupedData.from_arrays([[0.0, 2.0], [1.5, 0.0], [3.0, 4.0]], [2.0, 1.0, 3.0], [0, 0, 1], weights=[2.0, 1.0, 1.0])
    mask = (1 << 64) - 1

    def scrambled(state):
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        return state ^ (state >> 31)

    def of_row(values):
        golden = state = 0x9E3779B97F4A7C15
        for value in values:
            state = scrambled(((state ^ struct.unpack("<Q", struct.pack("<d", value + 0.0))[0]) + golden) & mask)
        return state

    expected = [
        (of_row([1.5, 0.0, 1.0, 1.0, 0.0]) + of_row([0.0, 2.0, 2.0, 2.0, 0.0])) & mask,
        of_row([3.0, 4.0, 3.0, 1.0, 0.0]),
    ]
    assert Batches.of(data).code.tolist() == Batches.of(zero).code.tolist() == expected
