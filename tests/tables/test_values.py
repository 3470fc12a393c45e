"""Declared categories, objects that are numbers, missing values that are dropped, and frequencies."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import scipy.sparse

import covey
from covey import GroupedData, Spec, fit, load, simulate_sites
from covey.estimators import (
    HierarchicalClassifier,
    HierarchicalGammaRegressor,
    HierarchicalPoissonRegressor,
    HierarchicalRegressor,
)
from covey.federation.operator.operate import report
from covey.federation.operator.settings import RunSettings
from covey.tables.values import Dropped

RNG = np.random.default_rng(7)
CLIENT = np.repeat(np.arange(12), 8)
X = RNG.normal(size=96)
MARGIN = 0.3 + 0.5 * X + RNG.normal(size=12)[CLIENT] * 0.5 + RNG.normal(size=3)[CLIENT // 4] * 0.4
FRAME = pl.DataFrame(
    {
        "client": CLIENT,
        "cluster": np.array(["a", "b", "c"])[CLIENT // 4],
        "x": X,
        "y": MARGIN + RNG.normal(size=96) * 0.7,
        "count": RNG.poisson(np.exp(MARGIN)),
        "yes": (MARGIN + RNG.logistic(size=96) > 0).astype(int),
        "cost": RNG.gamma(3.0, np.exp(MARGIN) / 3.0),
        "grade": np.tile(["mid", "low", "high", "mid"], 24),
    }
)
ORDER = ["low", "mid", "high"]
CODES = np.array([ORDER.index(grade) for grade in FRAME["grade"]])


def terms(frame, formula="y ~ grade + (1 | client)"):
    return HierarchicalRegressor(formula=formula, tests=False).fit(frame).terms_


def arrow(chunks=1):
    """A table of arrow whose categories are a dictionary; every chunk has the categories in its own order."""
    whole = FRAME.drop("grade").to_arrow()
    parts = np.array_split(CODES, chunks)
    grades = [pa.DictionaryArray.from_arrays(pa.array(part, pa.int32()), pa.array(ORDER)) for part in parts]
    return whole.append_column("grade", pa.chunked_array(grades))


DECLARED = {
    "pandas": lambda: FRAME.to_pandas().assign(grade=pd.Categorical(FRAME["grade"], ORDER)),
    "pandas, ordered": lambda: FRAME.to_pandas().assign(grade=pd.Categorical(FRAME["grade"], ORDER, ordered=True)),
    "polars": lambda: FRAME.with_columns(pl.col("grade").cast(pl.Enum(ORDER))),
    "arrow": arrow,
    "arrow, in chunks": lambda: arrow(3),
    "with a category that does not occur": lambda: FRAME.with_columns(pl.col("grade").cast(pl.Enum(["none", *ORDER]))),
}


@pytest.mark.parametrize("library", DECLARED)
def test_declared_categories_keep_their_order(library, tmp_path):
    frame = DECLARED[library]()
    model = HierarchicalRegressor(formula="y ~ grade + (1 | client)", tests=False).fit(frame)
    assert model.terms_ == ("Intercept", "grade[T.mid]", "grade[T.high]")
    again = load(model.save(tmp_path / "model"))
    for rows in (frame, FRAME):  # text has no order, but the model has
        np.testing.assert_array_equal(again.predict(rows), model.predict(frame))


def test_categories_without_an_order_are_sorted():
    assert terms(FRAME) == terms(FRAME.with_columns(pl.col("grade").cast(pl.Categorical)))
    assert terms(FRAME)[1:] == ("grade[T.low]", "grade[T.mid]")


@pytest.mark.parametrize("labels", [["0", "1", "2", "3+"], [0, 1, 2, "3+"], ["3+", "0", "1", "2"]])
def test_categories_may_look_like_numbers(labels):
    values = pd.Categorical(np.array(labels, dtype=object)[np.arange(96) % 4], labels)
    assert terms(FRAME.to_pandas().assign(grade=values))[1:] == tuple(f"grade[T.{label}]" for label in labels[1:])
    if isinstance(labels[0], str):
        enum = pl.Series(np.array(labels)[np.arange(96) % 4], dtype=pl.Enum(labels))
        assert terms(FRAME.with_columns(grade=enum))[1:] == tuple(f"grade[T.{label}]" for label in labels[1:])


def test_intervals_of_pandas_are_categories_and_can_be_saved(tmp_path):
    frame = FRAME.to_pandas()
    frame["grade"] = pd.cut(frame["x"], [-9, -0.5, 0.5, 9])
    model = HierarchicalRegressor(formula="y ~ grade + (1 | client)", tests=False).fit(frame)
    np.testing.assert_array_equal(load(model.save(tmp_path / "model")).predict(frame), model.predict(frame))


def test_objects_that_are_numbers_are_numbers():
    expected = HierarchicalRegressor(formula="y ~ x + (1 | client)", tests=False).fit(FRAME)
    objects = FRAME.to_pandas().astype({"x": object, "y": object})
    model = HierarchicalRegressor(formula="y ~ x + (1 | client)", tests=False).fit(objects)
    np.testing.assert_array_equal(model.coef_, expected.coef_)
    with pytest.raises(ValueError, match=r"Column 'x' is NaN in row 5"):
        model.fit(objects.assign(x=[None if row == 5 else value for row, value in enumerate(objects["x"])]))
    assert terms(FRAME.to_pandas().assign(grade=np.array([1, "b"] * 48, dtype=object))) == ("Intercept", "grade[T.b]")


def twice(frame):
    return pd.concat([frame, frame[["x"]]], axis=1)


ODD = {
    "sparse": (lambda: scipy.sparse.csr_matrix(np.ones((96, 2))), r"sparse matrix.*X.toarray\(\)"),
    "twice": (lambda: twice(FRAME.to_pandas()), r"two columns with the name 'x'; rename or drop one"),
}


@pytest.mark.parametrize("case", ODD)
@pytest.mark.parametrize("named", [True, False])
def test_tables_that_cannot_be_read_get_a_sentence(case, named):
    make, sentence = ODD[case]
    settings = {"formula": "y ~ x + (1 | client)"} if named else {"gamma": 1.0}
    given = {} if named else {"y": FRAME["y"].to_numpy(), "client": CLIENT}
    if named or case != "sparse":  # a sparse matrix with arrays beside it is read
        with pytest.raises(covey.CoveyError, match=sentence):
            HierarchicalRegressor(**settings).fit(make(), **given)
    if not named:
        model = HierarchicalRegressor(**settings).fit(FRAME[["x", "y"]].to_numpy(), **given)
        with pytest.raises(covey.CoveyError, match=sentence):
            model.predict(make(), client=CLIENT)


@pytest.mark.parametrize("make", [lambda ids: ids, lambda ids: pd.Series(ids)])
def test_ids_of_several_parts_get_a_sentence(make):
    ids = make(list(zip(FRAME["cluster"], FRAME["client"], strict=True)))
    with pytest.raises(covey.CoveyError, match=r"client ids are tuples, such as \('a', 0\); join"):
        HierarchicalRegressor(gamma=1.0).fit(FRAME[["x"]].to_numpy(), FRAME["y"], client=ids)


def test_lists_where_a_column_is_named_get_a_sentence():
    for wrong in (["a", "b"], CLIENT, ("client",)):
        with pytest.raises(covey.CoveyError, match=r"'client' parameter must be the name of one column.*fit\(X, y, client="):
            HierarchicalRegressor(client=wrong).fit(FRAME[["x"]], FRAME["y"])
    with pytest.raises(covey.CoveyError, match=r"'weights' parameter must be the name of one column"):
        fit(FRAME, Spec(formula="y ~ x", client="client", weights=[1.0]))
    with pytest.raises(covey.CoveyError, match=r"client ids are 'client'; give one id for each row"):
        HierarchicalRegressor(gamma=1.0).fit(FRAME[["x"]].to_numpy(), FRAME["y"], client="client")


def test_a_missing_cluster_is_named_as_such():
    frame = FRAME.with_columns(k=pl.Series(CLIENT % 4), cluster=pl.when(pl.int_range(96) == 3).then(None).otherwise("cluster"))
    with pytest.raises(covey.CoveyError, match=r"1 row has no cluster id \(first: row 3\)"):
        HierarchicalRegressor(formula="y ~ x + (1 | cluster/k)").fit(frame)


@pytest.mark.parametrize("estimator", [HierarchicalPoissonRegressor, HierarchicalGammaRegressor])
def test_an_offset_that_was_not_logged_is_refused(estimator):
    frame = FRAME.with_columns(exposure=pl.lit(2.0e4), y=pl.col("count") + 1)
    settings = {"formula": "y ~ x + (1 | client)", "tests": False}
    with pytest.raises(covey.CoveyError, match=r"offset has the value 20000\..*log scale.*logarithm of the exposure"):
        estimator(**settings, offset="exposure").fit(frame)
    estimator(**settings, offset="exposure").fit(frame.with_columns(pl.col("exposure").log()))
    HierarchicalRegressor(**settings, offset="exposure").fit(frame)  # a linear model may have any offset


# Missing values


def holes(seed=3, share=0.04, columns=("x", "y", "grade", "client", "cluster")):
    """Values that are missing at random, and how many rows and values these are."""
    rng = np.random.default_rng(seed)
    gaps = {name: rng.random(96) < share for name in columns}
    frame = FRAME.with_columns(
        pl.when(pl.Series(gap)).then(None).otherwise(pl.col(name)).alias(name) for name, gap in gaps.items()
    )
    return frame, gaps, np.logical_or.reduce(list(gaps.values()))


FORMULA = "y ~ x + grade + (1 | cluster/client)"


@pytest.mark.parametrize("convert", [lambda frame: frame, lambda frame: frame.to_pandas(), lambda frame: frame.to_arrow()])
def test_rows_with_missing_values_are_dropped_and_counted(convert, tmp_path):
    frame, gaps, any_gap = holes()
    with pytest.raises(covey.CoveyError, match=r"NaN|no c|no category|missing"):
        HierarchicalRegressor(formula=FORMULA).fit(convert(frame))
    model = HierarchicalRegressor(formula=FORMULA, na="drop").fit(convert(frame))
    expected = HierarchicalRegressor(formula=FORMULA).fit(FRAME.filter(pl.Series(~any_gap)))
    np.testing.assert_allclose(model.coef_, expected.coef_, rtol=1e-12)
    counts = {name: int(gap.sum()) for name, gap in sorted(gaps.items())}
    for each in (model, load(model.save(tmp_path / "model"))):
        document = each.summary().to_json()
        assert document["dropped"] == {"rows": int(any_gap.sum()), "of": 96, "columns": counts}
        assert f"note: {any_gap.sum()} of 96 rows dropped because values are missing ({counts['client']} of client" in str(each)
        assert "0 of" not in str(each)
    assert "dropped" not in str(expected)


def test_missing_values_in_columns_that_are_not_used_do_not_matter():
    frame, *_ = holes(columns=("grade",))
    model = HierarchicalRegressor(formula="y ~ x + (1 | client)", na="drop").fit(frame)
    assert model.model_.n_rows == 96
    assert model.model_.dropped.rows == 0


def test_missing_values_of_arrays_are_dropped():
    x, y, ids = FRAME[["x"]].to_numpy().copy(), FRAME["y"].to_numpy().copy(), FRAME["client"].to_list()
    x[3], y[[4, 9]], ids[10] = np.nan, np.nan, None
    kept = np.setdiff1d(np.arange(96), [3, 4, 9, 10])
    model = HierarchicalRegressor(gamma=1.0, na="drop").fit(x, y, client=ids, sample_weight=np.ones(96))
    expected = HierarchicalRegressor(gamma=1.0).fit(x[kept], y[kept], client=CLIENT[kept])
    np.testing.assert_allclose(model.coef_, expected.coef_, rtol=1e-12)
    assert model.model_.dropped.columns == {"x0": 1, "y": 2, "client": 1, "weights": 0}
    yes = np.where(FRAME["yes"].to_numpy() == 1, "yes", "no").astype(object)
    yes[5] = None
    classes = HierarchicalClassifier(gamma=1.0, na="drop").fit(FRAME[["x"]].to_numpy(), yes, client=CLIENT)
    assert (classes.classes_.tolist(), classes.model_.n_rows) == (["no", "yes"], 95)


def test_errors_name_the_rows_of_the_table_and_not_of_what_is_left():
    frame = FRAME.with_columns(x=pl.when(pl.int_range(96) < 4).then(None).otherwise("x"))
    frame = frame.with_columns(y=pl.when(pl.int_range(96) == 50).then(np.inf).otherwise("y"))
    with pytest.raises(covey.CoveyError, match=r"response is infinite \(inf\) in row 50 \(client 6\)"):
        HierarchicalRegressor(formula="y ~ x + (1 | client)", na="drop").fit(frame)
    with pytest.raises(covey.CoveyError, match=r"Every row has a missing value \('x' in 96 rows\)"):
        HierarchicalRegressor(formula="y ~ x + (1 | client)", na="drop").fit(frame.with_columns(x=pl.lit(None)))
    with pytest.raises(covey.CoveyError, match=r"'na' parameter must be one of 'refuse', 'drop'"):
        HierarchicalRegressor(formula="y ~ x + (1 | client)", na="omit").fit(frame)


def test_updates_drop_missing_values_too():
    frame, _, any_gap = holes()
    model = HierarchicalRegressor(formula=FORMULA, na="drop", tests=False).fit(FRAME)
    more = model.update(frame.with_columns(pl.col("y") + 1.0))
    assert more.model_.n_rows == 192 - any_gap.sum()
    assert more.model_.dropped.rows == any_gap.sum()
    assert more.model_.dropped.of == 192


def test_each_site_drops_its_own_rows_and_only_counts_leave(tmp_path):
    frame, gaps, any_gap = holes(columns=("x", "y", "grade", "client"))
    spec = Spec(formula=FORMULA, na="drop", tests=False)
    here = fit(frame, spec)
    expected = {name: int(gaps.get(name, 0 * any_gap).sum()) for name in ("client", "cluster", "grade", "x", "y")}
    for secure in (False, True):
        models = tmp_path / f"models {secure}"
        run = simulate_sites(frame, spec, 3, settings=RunSettings(secure=secure), models=models)
        np.testing.assert_allclose(run.outcome.model.wbar, here.global_coef_, rtol=1e-8)
        assert run.outcome.model.dropped == here.model_.dropped == Dropped(int(any_gap.sum()), 96, expected)
        assert sum(load(site).model_.dropped.rows for site in models.iterdir()) == any_gap.sum()
    assert f"{any_gap.sum()} of 96 rows dropped" in report(run.outcome)
    with pytest.raises(covey.CoveyError, match="no client id"):
        simulate_sites(frame, replace(spec, na="refuse"), 3)


# Frequencies

FAMILIES = {
    "y": HierarchicalRegressor,
    "yes": HierarchicalClassifier,
    "count": HierarchicalPoissonRegressor,
    "cost": HierarchicalGammaRegressor,
}
TIMES = np.random.default_rng(5).integers(0, 4, size=96)
COUNTED = FRAME.with_columns(times=TIMES)
EXPANDED = COUNTED[np.repeat(np.arange(96), TIMES)]


@pytest.mark.parametrize("response", FAMILIES)
def test_a_frequency_counts_equal_rows(response):
    formula = f"{response} ~ x + (1 | cluster/client)"
    counted = FAMILIES[response](formula=formula, frequency="times").fit(COUNTED)
    expanded = FAMILIES[response](formula=formula).fit(EXPANDED)
    assert counted.model_.n_rows == TIMES.sum() == expanded.model_.n_rows
    np.testing.assert_allclose(counted.coef_, expanded.coef_, rtol=1e-10, atol=1e-12)
    for name in ("log_likelihood", "aic", "bic", "rows"):
        assert getattr(counted.components_, name) == pytest.approx(getattr(expanded.components_, name), rel=1e-10)
    assert [test.statistic for test in counted.components_.tests] == pytest.approx(
        [test.statistic for test in expanded.components_.tests], rel=1e-8, abs=1e-8
    )
    np.testing.assert_allclose(counted.predict_interval(FRAME), expanded.predict_interval(FRAME), rtol=1e-10)


def test_frequencies_of_arrays_weights_and_positions():
    w = np.random.default_rng(1).uniform(0.5, 2.0, 96)
    at = np.repeat(np.arange(96), TIMES)
    x, y = FRAME[["x"]].to_numpy(), FRAME["y"].to_numpy()
    expected = HierarchicalRegressor(tests=False).fit(x[at], y[at], client=CLIENT[at], sample_weight=w[at])
    shuffled = np.random.default_rng(2).permutation(96)
    given = {"client": CLIENT[shuffled], "sample_weight": w[shuffled], "frequency": TIMES[shuffled]}
    counted = HierarchicalRegressor(tests=False).fit(x[shuffled], y[shuffled], **given)
    np.testing.assert_allclose(counted.coef_, expected.coef_, rtol=1e-10)
    by_position = HierarchicalRegressor(client=0, weights=2, frequency=3, tests=False)
    np.testing.assert_allclose(by_position.fit(np.column_stack([CLIENT, x, w, TIMES]), y).coef_, expected.coef_, rtol=1e-10)
    grouped = GroupedData.from_arrays(x, y, CLIENT, frequency=TIMES)
    assert grouped.n_rows == TIMES.sum()
    np.testing.assert_array_equal(grouped.y, y[at])


def test_frequencies_of_updates_cross_validation_and_sites():
    settings = {"formula": "y ~ x + (1 | cluster/client)", "tests": False}
    first = COUNTED["client"] < 10
    counted = (
        HierarchicalRegressor(**settings, frequency="times").fit(COUNTED.filter(first)).add_clients(COUNTED.filter(~first))
    )
    old = EXPANDED["client"] < 10
    expanded = HierarchicalRegressor(**settings).fit(EXPANDED.filter(old)).add_clients(EXPANDED.filter(~old))
    np.testing.assert_allclose(counted.coef_, expanded.coef_, rtol=1e-9)
    with pytest.raises(covey.CoveyError, match="already"):
        counted.update(COUNTED.filter(~first))
    cv = {"client": "client", "formula": "y ~ x", "penalty": "cv", "random_state": 1}
    folds = [HierarchicalRegressor(**cv, frequency="times").fit(COUNTED), HierarchicalRegressor(**cv).fit(EXPANDED)]
    np.testing.assert_allclose(folds[0].coef_, folds[1].coef_, rtol=1e-10)
    across = simulate_sites(COUNTED, Spec(**settings, frequency="times"))
    here = fit(EXPANDED, Spec(**settings))
    np.testing.assert_allclose(across.outcome.model.wbar, here.global_coef_, rtol=1e-9)
    assert across.outcome.model.n_rows == TIMES.sum()


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (1.5, r"frequency is 1.5 in row 4; it counts equal rows.*weights= takes precisions"),
        (-1.0, r"frequency is -1 in row 4"),
        (None, r"frequency is nan in row 4"),
        (3e9, r"frequencies add up to 3e\+09 rows"),
    ],
)
def test_frequencies_are_whole_numbers(wrong, sentence):
    frame = FRAME.with_columns(times=pl.when(pl.int_range(96) == 4).then(wrong).otherwise(1.0))
    with pytest.raises(covey.CoveyError, match=sentence):
        HierarchicalRegressor(formula="y ~ x + (1 | client)", frequency="times").fit(frame)


def test_categories_of_rows_that_do_not_count_are_not_terms():
    frame = FRAME.with_columns(times=(pl.col("grade") != "high").cast(pl.Int64))
    model = HierarchicalRegressor(formula="y ~ grade + (1 | client)", frequency="times", tests=False).fit(frame)
    assert model.terms_ == ("Intercept", "grade[T.mid]")


def test_the_new_settings_survive_json():
    spec = Spec(formula="y ~ x", client="client", frequency="times", na="drop")
    assert Spec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    old = {name: value for name, value in spec.to_json().items() if name not in ("frequency", "na")}
    assert Spec.from_json(old).na == "refuse"
