"""Clients within clusters: with ``cluster/client`` a client is a pair of ids, whether or not client ids repeat."""

from __future__ import annotations

import json
from hashlib import sha256

import numpy as np
import pandas as pd
import polars as pl
import pytest
from sklearn.model_selection import cross_val_score

import covey
from covey import HierarchicalRegressor, Spec, simulate_sites
from covey.errors import DataError
from covey.objective.objective import Penalty
from covey.problem.problem import Problem, resolve
from covey.problem.rows import read_rows

FORMULA = "y ~ x + (1 | school/class)"


def pupils(ids="integers"):
    """Six schools with classes 0 to 3; ``unique`` class ids differ between schools."""
    rng = np.random.default_rng(1)
    school, group = np.repeat(np.arange(6), 20), np.tile(np.repeat(np.arange(4), 5), 6)
    frame = pl.DataFrame({"school": [f"s{j}" for j in school], "class": group, "x": rng.normal(size=120)})
    effect = np.repeat(rng.normal(size=24), 5)
    frame = frame.with_columns(y=pl.Series(effect + rng.normal(size=120)))
    if ids == "unique":
        return frame.with_columns(pl.Series("class", group + 10 * school))
    return frame.with_columns(pl.col("class").cast(pl.String)) if ids == "text" else frame


def fitted(frame, **settings):
    return HierarchicalRegressor(formula=FORMULA, tests=False, **settings).fit(frame)


def test_ids_keep_their_type_whether_or_not_they_repeat():
    repeated, unique, text = (fitted(pupils(ids)) for ids in ("integers", "unique", "text"))
    np.testing.assert_array_equal(repeated.coef_, unique.coef_)
    np.testing.assert_array_equal(repeated.coef_, text.coef_)
    assert repeated.clients_.dtype == unique.clients_.dtype == np.int64
    assert repeated.clients_.tolist() == [0, 1, 2, 3] * 6
    assert text.clients_.tolist() == ["0", "1", "2", "3"] * 6
    assert repeated.client_clusters_.tolist() == [f"s{j}" for j in range(6) for _ in range(4)]
    ids = repeated.coef_frame("client").select("cluster", "client").unique(maintain_order=True)
    assert ids.rows()[:5] == [("s0", 0), ("s0", 1), ("s0", 2), ("s0", 3), ("s1", 0)]


def test_one_repeated_id_changes_nothing_for_the_others():
    frame = pupils("unique")
    once = frame.with_columns(pl.when(pl.col("class") == 13).then(3).otherwise(pl.col("class")).alias("class"))
    np.testing.assert_allclose(fitted(once).predict(once), fitted(frame).predict(frame), rtol=1e-12)
    assert set(fitted(once).clients_.tolist()) == set(fitted(frame).clients_.tolist()) - {13}


@pytest.mark.parametrize("ids", ["integers", "unique"])
def test_an_unseen_class_gets_the_model_of_its_school(ids):
    frame = pupils(ids)
    model, strict = fitted(frame), fitted(frame, unseen="raise")
    new = frame[:3].with_columns(pl.Series("class", [99, 0, None]), pl.Series("school", ["s1", "new", "s2"]))
    rows = np.column_stack([np.ones(3), new["x"]])
    upper = np.array([model.cluster_coef_[1], model.global_coef_, model.cluster_coef_[2]])
    np.testing.assert_allclose(model.predict(new), (rows * upper).sum(axis=1))
    with pytest.raises(DataError, match=r"Client 99 of cluster 's1' was not seen"):
        strict.predict(new[:1])
    # Class 0 of school s0 is not class 0 of school s5, also if no other school had a class 0 in training.
    moved = frame[:1].with_columns(school=pl.lit("s5"), **{"class": pl.lit(0)})
    found = np.array([1.0, moved["x"][0]]) @ (model.coef_[20] if ids == "integers" else model.cluster_coef_[5])
    np.testing.assert_allclose(model.predict(moved), [found])


def test_prediction_needs_the_school():
    model = fitted(pupils())
    with pytest.raises(DataError, match="There is no column 'school'"):
        model.predict(pupils().drop("school"))


def test_cross_validation_does_not_depend_on_repeated_ids():
    scores = []
    for ids in ("integers", "unique"):
        frame = pd.DataFrame(pupils(ids).to_dict(as_series=False))
        scores.append(cross_val_score(HierarchicalRegressor(formula=FORMULA, tests=False), frame, frame["y"], cv=4))
    assert np.isfinite(scores).all()
    np.testing.assert_array_equal(*scores)


def test_clients_are_removed_by_pair_or_by_an_id_that_is_unique():
    repeated, unique = fitted(pupils()), fitted(pupils("unique"))
    with pytest.raises(DataError, match=r"Client 1 is in 6 clusters; give the pair \(cluster, client\): \('s0', 1\)"):
        repeated.remove_clients([1])
    by_pair = repeated.remove_clients([("s1", 1), ("s2", 0)])
    np.testing.assert_array_equal(by_pair.coef_, unique.remove_clients([11, 20]).coef_)
    np.testing.assert_array_equal(by_pair.coef_, unique.remove_clients([("s1", 11), 20]).coef_)
    for unknown in (("s1", 77), ("s0", 11), 77):
        with pytest.raises(DataError, match="The model has no client"):
            unique.remove_clients([unknown])
    with pytest.raises(DataError, match=r"Got \('s1', 1, 2\)"):
        repeated.remove_clients([("s1", 1, 2)])


def test_added_rows_find_their_class():
    frame = pupils()
    model = fitted(frame)
    more = frame[:4].with_columns(school=pl.lit("s9"))
    updated = model.update(pl.concat([frame[100:102], more]))
    assert len(updated.clients_) == 25
    assert updated.client_clusters_[-1] == "s9"
    assert updated.model_.rows.sum() == 126
    assert updated.model_.rows[20] == 7


def test_client_and_cluster_columns_are_not_nested():
    with pytest.raises(DataError, match="a client belongs to one cluster"):
        HierarchicalRegressor(formula="y ~ x", client="class", cluster="school", tests=False).fit(pupils())


@pytest.mark.parametrize("ids", ["integers", "unique"])
def test_sites_have_the_same_classes(ids):
    """Class 0 of school s0 and class 0 of school s1 are at different sites, and are different clients."""
    frame, spec = pupils(ids), Spec(formula=FORMULA, tests=False)
    by_school = frame.with_columns(site="site" + (pl.col("school").str.slice(1).cast(pl.Int64) % 2).cast(pl.String))
    run = simulate_sites(by_school, spec, "site")
    assert run.difference(covey.fit(frame, spec).model_) < 1e-12
    tree = run.sites["site0"].node(run.outcome.run).data.hierarchy
    assert tree.clients.dtype == np.int64


def test_a_penalty_by_client_is_given_by_pairs():
    frame = pupils()
    spec = Spec(formula="y ~ x", client="class", cluster="school", nested=True, gamma=1.0)
    data, problem = read_rows(frame, resolve(spec))
    pairs = dict(zip(data.hierarchy.identities.tolist(), np.arange(24.0) + 1.0, strict=True))
    assert Penalty.of(data.hierarchy, gamma=pairs).gamma.tolist() == (np.arange(24.0) + 1.0).tolist()
    by_pair = resolve(Spec(**{**vars(spec), "gamma": pairs}))
    assert Problem.from_json(json.loads(json.dumps(by_pair.to_json()))).spec.gamma == pairs
    assert problem.spec.nested


@pytest.mark.parametrize("ids", ["integers", "text", "unique"])
def test_models_of_format_2_are_read(ids, tmp_path):
    """Format 2 named the clients 'class:school' if a class id repeated, and left them as they are if none did."""
    frame = pupils(ids)
    model = fitted(frame)
    model.save(tmp_path / "m")
    clients = pl.read_parquet(tmp_path / "m" / "clients.parquet")
    schools = pl.Series(model.client_clusters_.tolist())
    if ids != "unique":
        labels = clients["client"].cast(pl.String) + ":" + schools
        clients.with_columns(client=labels).write_parquet(tmp_path / "m" / "clients.parquet")
    document = json.loads((tmp_path / "m" / "model.json").read_text())
    document["format"], document["spec"]["nested"] = 2, ids != "unique"
    del document["checksum"]
    document["sha256"]["clients"] = sha256((tmp_path / "m" / "clients.parquet").read_bytes()).hexdigest()
    (tmp_path / "m" / "model.json").write_text(json.dumps(document))
    again = covey.load(tmp_path / "m")
    if ids == "text":  # labels do not say whether 0 was a number or text
        frame = frame.with_columns(pl.col("class").cast(pl.Int64))
    np.testing.assert_array_equal(again.predict(frame), model.predict(pupils(ids)))
    assert again.model_.spec.nested
