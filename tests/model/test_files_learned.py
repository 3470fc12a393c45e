"""Models with learned penalties on disk: intervals, summaries and tests to the bit, and errors without sums."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from covey import HierarchicalClassifier, HierarchicalPoissonRegressor, HierarchicalRegressor, load
from covey.datasets import simulate
from covey.model.files import load_model, save_model
from covey.model.updates import remove_clients
from covey.variance.components import Whole
from tests.model.test_inference import one_sentence

FRAME = simulate(
    "poisson", clusters=6, clients=5, rows=9, d=2, wbar=0.3, intercept=True, client_sd=0.4, cluster_sd=0.5, seed=3
).frame().drop("x0").rename({"x1": "x"}).with_columns(w=pl.col("x").abs() + 0.5, high=pl.col("y") > 1)  # fmt: skip
NAMED = {"client": "client", "cluster": "cluster"}

MODELS = [
    HierarchicalRegressor(formula="y ~ x + (x | cluster/client)"),
    HierarchicalRegressor(formula="y ~ x + (1 | client)"),
    HierarchicalRegressor(formula="y ~ x + (1 | cluster)", **NAMED),
    HierarchicalRegressor(formula="y ~ x + (1 | cluster/client)", per_cluster=True, weights="w"),
    HierarchicalRegressor(formula="y ~ x", **NAMED, vary={"client": ("x",)}, covariance={"client": "isotropic"}, penalty="ml"),
    HierarchicalRegressor(formula="y ~ x", **NAMED, penalty="reml", tests=False, offset="w"),
    HierarchicalClassifier(formula="high ~ x + (1 | cluster/client)"),
    HierarchicalPoissonRegressor(formula="y ~ x + (1 | cluster/client)"),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: f"{type(model).__name__} {model.formula}")
def test_a_learned_model_is_restored_to_the_bit(model, tmp_path):
    model.fit(FRAME)
    again = load(model.save(tmp_path / "model"))
    new = FRAME[:4].with_columns(client=pl.col("client") + 900)
    rows = pl.concat([FRAME[:20], new, new.with_columns(cluster=pl.col("cluster") + 900)])
    for coverage in (0.5, 0.95):
        np.testing.assert_array_equal(
            again.predict_interval(rows, coverage=coverage), model.predict_interval(rows, coverage=coverage)
        )
    for level in ("client", "cluster", "global"):
        assert again.coef_frame(level).equals(model.coef_frame(level))
    assert again.reliability().equals(model.reliability())
    assert again.summary().to_json() == model.summary().to_json()
    assert str(again) == str(model)
    assert again.components_.tests == model.components_.tests
    few = FRAME[:3].with_columns(client=pl.lit(999))
    np.testing.assert_array_equal(again.add_clients(few).coef_, model.add_clients(few).coef_)
    np.testing.assert_array_equal(again.remove_clients([0]).coef_, model.remove_clients([0]).coef_)
    document = json.loads((tmp_path / "model" / "model.json").read_text())
    assert document["format"] == 3
    assert set(document["sha256"]) == {"clusters", "clients", "sums"}


def test_an_updated_model_round_trips(tmp_path):
    model = HierarchicalRegressor(formula="y ~ x + (1 | cluster/client)", per_cluster=True).fit(FRAME)
    few = FRAME[:3].with_columns(client=pl.lit(999), cluster=pl.lit(77))
    updated = model.add_clients(few).remove_clients([0, 1])
    again = load(updated.save(tmp_path / "model"))
    np.testing.assert_array_equal(again.predict_interval(few), updated.predict_interval(few))
    np.testing.assert_array_equal(again.coef_, updated.coef_)
    np.testing.assert_array_equal(again.model_.posterior.new_clients, updated.model_.posterior.new_clients)


def test_without_sums_a_model_predicts_and_explains_that_it_has_no_intervals(tmp_path):
    model = HierarchicalRegressor(formula="y ~ x + (1 | cluster/client)").fit(FRAME)
    folder = model.save(tmp_path / "model", sums=False)
    assert sorted(path.name for path in folder.iterdir()) == ["clients.parquet", "clusters.parquet", "model.json"]
    again = load(folder)
    np.testing.assert_array_equal(again.predict(FRAME), model.predict(FRAME))
    for ask in (
        lambda: again.predict_interval(FRAME),
        lambda: again.add_clients(FRAME[:2]),
        lambda: again.remove_clients([0]),
        lambda: again.reliability(),
        lambda: again.bootstrap(draws=2),
    ):
        with pytest.raises(ValueError, match="sums=True") as caught:
            ask()
        one_sentence(caught)
    assert "Hierarchical linear model" in str(again)
    json.dumps(again.summary().to_json(), allow_nan=False)


def test_without_sums_a_model_has_its_variance_components(tmp_path):
    model = HierarchicalRegressor(formula="y ~ x + (1 | cluster/client)").fit(FRAME)
    again = load(model.save(tmp_path / "model", sums=False))
    assert again.summary().to_json()["variance_components"] == model.summary().to_json()["variance_components"]


@pytest.mark.parametrize(
    "vary",
    [("x",), np.array(["x"]), pl.Series(["x"]), {"x"}, {"client": np.array(["x"])}, ["1", "x"], [1], "x"],
    ids=lambda vary: type(vary).__name__,
)
def test_vary_is_saved_from_any_container(vary, tmp_path):
    model = HierarchicalRegressor(formula="y ~ x", **NAMED, vary=vary, tests=False).fit(FRAME)
    again = load(model.save(tmp_path / "model"))
    np.testing.assert_array_equal(again.coef_, model.coef_)
    assert again.fit(FRAME).components_.client.terms == model.components_.client.terms


def test_a_model_of_format_1_has_no_intervals_and_says_why():
    model = load(Path(__file__).parents[1] / "golden" / "model-format-1")
    rows = pl.DataFrame({"who": ["a"], "group": ["g"], "x": [1.0], "zone": ["r"]})
    assert np.isfinite(model.predict(rows)).all()
    with pytest.raises(ValueError, match="need variances that were learned from the data"):
        model.predict_interval(rows)
    assert model.summary().to_json()["method"] is None
    assert "estimate" in model.coef_frame("cluster").columns


def test_a_model_without_its_sums_file_is_damaged(tmp_path):
    folder = HierarchicalRegressor(formula="y ~ x + (1 | cluster/client)").fit(FRAME).save(tmp_path / "model")
    (folder / "sums.parquet").unlink()
    with pytest.raises(ValueError, match=r"sums\.parquet is missing"):
        load(folder)


def test_sums_over_all_sites_are_saved_and_checked(tmp_path):
    """With these sums some of the clients have the intervals of the whole fit, and clusters without clients have intervals."""
    fitted = HierarchicalRegressor(formula="y ~ x + (1 | cluster/client)").fit(FRAME)
    model, posterior = fitted.model_, fitted.model_.posterior
    flat = np.array([[True, False], [True, False]])
    found = {"satterthwaite": posterior.satterthwaite, "draws": posterior.draws}
    learned = replace(model.learned, whole=Whole(30, posterior.clusters, flat), **found)
    part = replace(model, learned=learned)
    again, _ = load_model(save_model(part, tmp_path / "model", sums=False))
    assert again.coefficients("cluster").equals(model.coefficients("cluster"))
    assert "std_error" not in again.coefficients("client").columns
    np.testing.assert_array_equal(again.posterior.freedom(), posterior.freedom())
    with_sums, _ = load_model(save_model(part, tmp_path / "model"))
    assert with_sums.coefficients("client").equals(model.coefficients("client"))
    with pytest.raises(ValueError, match="one part of a fit across sites") as caught:
        remove_clients(with_sums, [0])
    one_sentence(caught)
    document = json.loads((tmp_path / "model" / "model.json").read_text())
    draws = document["learned"]["draws"]["w"]
    document["learned"]["draws"]["w"] = draws[1:]
    del document["checksum"]
    (tmp_path / "model" / "model.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match="uncertainty of its variance components does not match"):
        load_model(tmp_path / "model")
    document["learned"]["draws"]["w"] = draws
    document["learned"]["whole"]["clusters"].pop()
    (tmp_path / "model" / "model.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match="do not match its clients, clusters and terms"):
        load_model(tmp_path / "model")


def test_a_folder_without_the_uncertainty_of_components_has_intervals_that_take_them_as_known(tmp_path):
    """As written by earlier versions, at a site: normal quantiles, and containment for global coefficients."""
    fitted = HierarchicalRegressor(formula="y ~ x + (1 | cluster/client)").fit(FRAME)
    model, posterior = fitted.model_, fitted.model_.posterior
    whole = Whole(30, posterior.clusters, np.array([[True, False], [True, False]]))
    path = save_model(replace(model, learned=replace(model.learned, whole=whole)), tmp_path / "model")
    document = json.loads((path / "model.json").read_text())
    for name in ("basis", "satterthwaite", "draws"):
        assert document["learned"].pop(name) is None
    del document["checksum"]
    (path / "model.json").write_text(json.dumps(document))
    again, _ = load_model(path)
    for level in ("client", "cluster"):
        frame = again.coefficients(level)
        half = 1.959963984540054 * frame["std_error"].to_numpy()
        np.testing.assert_allclose((frame["upper"] - frame["lower"]).to_numpy(), 2 * half, rtol=1e-12)
    assert again.coefficients("global")["df"].to_list() == [5.0, 268.0]
    fewer, _ = load_model(save_model(model, tmp_path / "fewer", sums=False))
    assert fewer.coefficients("global").equals(model.coefficients("global"))
