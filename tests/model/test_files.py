"""Models on disk: exact, versioned, and with detection of damage."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from covey import HierarchicalClassifier, HierarchicalPoissonRegressor, HierarchicalRegressor, load
from covey.datasets import simulate
from covey.errors import ModelError

GOLDEN = [0.259474618115873, 0.07795894471018716, 1.8953038431948022]


@pytest.fixture(scope="module")
def frame():
    drawn = simulate("poisson", clusters=3, clients=5, rows=12, d=2, client_sd=0.3, cluster_sd=0.3, seed=3)
    zone = pl.Series("zone", np.array(["a", "b", "c"])[np.arange(len(drawn.y)) % 3])
    return drawn.frame().with_columns(zone, label=pl.when(pl.col("y") > 0).then(pl.lit("some")).otherwise(pl.lit("none")))


@pytest.fixture
def folder(frame, tmp_path):
    return HierarchicalRegressor(client="client", cluster="cluster", formula="y ~ x0").fit(frame).save(tmp_path / "model")


@pytest.mark.parametrize(
    "model",
    [
        HierarchicalRegressor(client="client", cluster="cluster", formula="y ~ x0 * zone"),
        HierarchicalRegressor(client="client", cluster="cluster", formula="y ~ x0", gamma={0: 1.0, 1: 2.0, 2: 3.5}, lam=np.inf),
        HierarchicalRegressor(client="client", cluster="cluster", formula="y ~ x0", baseline="locally-trained"),
        HierarchicalClassifier(client="client", cluster="cluster", formula="label ~ x0", unseen="raise"),
        HierarchicalPoissonRegressor(client="client", formula="y ~ x0", offset="x1", reduction="mean", alpha=0.3),
    ],
)
def test_round_trip_is_exact(model, frame, tmp_path):
    model.fit(frame)
    again = load(model.save(tmp_path / "model"))
    assert type(again) is type(model)
    for level in ("coef_", "cluster_coef_", "global_coef_", "clients_", "clusters_"):
        np.testing.assert_array_equal(getattr(again, level), getattr(model, level))
    np.testing.assert_array_equal(again.predict(frame), model.predict(frame))
    assert again.convergence_ == model.convergence_
    assert str(again) == str(model)
    assert again.get_params() == model.get_params() | {"random_state": model.model_.spec.seed}
    np.testing.assert_array_equal(load(again.save(tmp_path / "twice")).coef_, model.coef_)


def test_plain_arrays_round_trip(tmp_path):
    drawn = simulate(clusters=2, clients=3, rows=9, d=2, seed=0)
    stacked = np.column_stack([drawn.client, drawn.X])
    model = HierarchicalRegressor(client=0).fit(stacked, drawn.y)
    again = load(model.save(tmp_path / "model"))
    np.testing.assert_array_equal(again.predict(stacked), model.predict(stacked))
    with pytest.raises(ValueError, match="features"):
        again.predict(stacked[:, :2])


def test_a_model_replaces_an_older_model_but_nothing_else(folder, frame, tmp_path):
    model = HierarchicalRegressor(client="client", formula="y ~ 1").fit(frame)
    model.save(folder)
    assert load(folder).terms_ == ("Intercept",)
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "thesis.txt").write_text("precious")
    with pytest.raises(ValueError, match="exists and is not a covey model"):
        model.save(notes)
    assert (notes / "thesis.txt").read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "notes"]


def test_only_a_folder_that_is_a_model_is_replaced(folder, frame):
    model = HierarchicalRegressor(client="client", formula="y ~ 1").fit(frame)
    (folder / "thesis.txt").write_text("precious")
    with pytest.raises(ValueError, match="exists and is not a covey model"):
        model.save(folder)
    (folder / "thesis.txt").unlink()
    (folder / "model.json").write_text('{"format": "of another program"}')
    with pytest.raises(ValueError, match="exists and is not a covey model"):
        model.save(folder)


def test_a_failed_write_leaves_the_old_model(folder, frame, monkeypatch):
    before, rename = load(folder).coef_, Path.rename

    def failing(self, target):
        if self.name == "model" and Path(target) == folder:
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(ModelError, match=r"cannot be written.*model.*No space left"):
        HierarchicalRegressor(client="client", formula="y ~ 1").fit(frame).save(folder)
    monkeypatch.undo()
    np.testing.assert_array_equal(load(folder).coef_, before)
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_numpy_numbers_are_saved_as_numbers(frame, tmp_path):
    model = HierarchicalRegressor(
        client="client", formula="y ~ 1", max_iter=np.int64(5), random_state=np.int32(3), gamma=np.full(15, 2, dtype=np.float32)
    )
    again = load(model.fit(frame).save(tmp_path / "m"))
    assert again.get_params()["max_iter"] == 5
    assert again.get_params()["gamma"] == [2.0] * 15


def test_a_missing_offset_is_an_error_after_loading_too(tmp_path):
    X, counts, client = np.zeros((4, 1)), [1, 3, 0, 8], ["a", "a", "b", "b"]
    model = HierarchicalPoissonRegressor(gamma=1.0).fit(X, counts, client=client, offset=np.full(4, 4.6))
    for fitted in (model, load(model.save(tmp_path / "m"))):
        with pytest.raises(ValueError, match="fitted with an offset: pass offset="):
            fitted.predict(X, client=client)


def test_an_old_saved_model_still_opens():
    """A folder that covey 0.1.0 wrote (format 1): later versions must read it and give the same predictions."""
    model = load(Path(__file__).parents[1] / "golden" / "model-format-1")
    rows = pl.DataFrame(
        {"who": ["a", "z", None], "group": ["g", "h", "nowhere"], "x": [1.0, 2.0, 3.0], "zone": ["r", "u", "r"]}
    )
    np.testing.assert_allclose(model.predict(rows), GOLDEN, rtol=1e-14)
    assert model.get_params()["gamma"] == {"g": 2.0, "h": 0.5}


def damage(change):
    def apply(folder):
        document = json.loads((folder / "model.json").read_text())
        change(document)
        document.pop("checksum", None)  # as if somebody had made it on purpose
        (folder / "model.json").write_text(json.dumps(document))

    return apply


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda folder: (folder / "model.json").write_text("{"), "damaged: model.json is not valid JSON"),
        (lambda folder: (folder / "model.json").unlink(), "not a covey model"),
        (lambda folder: (folder / "clients.parquet").unlink(), "clients.parquet is missing"),
        (lambda folder: (folder / "clients.parquet").write_bytes(b"PAR1"), "clients.parquet does not match model.json"),
        (damage(lambda document: document.update(format=99)), "format 99.*upgrade covey"),
        (damage(lambda document: document.pop("spec")), "is damaged"),
        (damage(lambda document: document["spec"].update(colour="red")), "is damaged"),
        (damage(lambda document: document["design"].update(rhs="__import__('os')")), "not those of the formula"),
        (
            damage(
                lambda document: (
                    document["design"].update(rhs="__import__('os')"),
                    document["spec"].update(formula="y ~ __import__('os')"),
                )
            ),
            "cannot be read|not supported",
        ),
        (damage(lambda document: document["spec"].update(formula="y ~ (a + b + c + d)**20")), "more than 5,000 terms"),
        (damage(lambda document: document.pop("format")), "no format version"),
        (damage(lambda document: document["spec"].update(family="tweedie")), "'tweedie'.*from_functions"),
        (damage(lambda document: document["global"].update(x0="7")), "global coefficients are not numbers"),
    ],
)
def test_a_damaged_model_is_named(folder, harm, message):
    harm(folder)
    with pytest.raises(ValueError, match=message):
        load(folder)


def test_a_missing_model_is_named(tmp_path):
    with pytest.raises(ValueError, match="There is no model folder"):
        load(tmp_path / "nothing")
