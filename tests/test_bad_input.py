"""Every case of bad input: the message says which column, client and value, and what to do."""

from __future__ import annotations

from datetime import date

import numpy as np
import pandas as pd
import polars as pl
import pytest

from covey import GroupedData, HierarchicalClassifier, HierarchicalPoissonRegressor, HierarchicalRegressor, read_table

GOOD = pl.DataFrame(
    {
        "who": ["a", "a", "b", "b", "c", "c"],
        "group": ["g", "g", "g", "g", "h", "h"],
        "x": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        "zone": ["u", "r", "u", "r", "u", "r"],
        "y": [0.0, 1.0, 1.0, 0.0, 2.0, 1.0],
        "w": [1.0] * 6,
    }
)


def with_value(column, row, value):
    values = GOOD[column].to_list()
    values[row] = value
    return GOOD.with_columns(pl.Series(column, values))


CASES = [
    (with_value("x", 3, float("nan")), {}, r"Column 'x' is NaN in row 3 \(client 'b'\); fill the value or leave the row out"),
    (with_value("x", 3, None), {}, r"Column 'x' is NaN in row 3 \(client 'b'\)"),
    (with_value("x", 3, float("inf")), {}, r"Column 'x' is infinite \(inf\) in row 3"),
    (with_value("x", 0, 0.0), {"formula": "y ~ log(x)"}, r"Column 'log\(x\)' is infinite \(inf\) in row 0 \(client 'a'\)"),
    (with_value("y", 2, float("nan")), {}, r"The response is NaN in row 2 \(client 'b'\)"),
    (with_value("w", 1, float("nan")), {"weights": "w"}, r"The weight is NaN in row 1"),
    (with_value("w", 1, -2.0), {"weights": "w"}, r"The weight -2 in row 1 \(client 'a'\) is negative"),
    (GOOD.with_columns(w=pl.lit(0.0)), {"weights": "w"}, r"All weights are zero"),
    (with_value("w", 5, float("inf")), {"offset": "w"}, r"The offset is infinite \(inf\) in row 5 \(client 'c'\)"),
    (with_value("group", 1, "h"), {}, r"Client 'a' is in clusters '[gh]' and '[gh]', but a client belongs to one cluster"),
    (with_value("who", 4, None), {}, r"1 row has no client id \(first: row 4\)"),
    (with_value("group", 0, None), {}, r"1 row has no cluster id \(first: row 0\)"),
    (GOOD[:0], {}, r"The table has no rows"),
    (GOOD, {"client": "whom"}, r"There is no column 'whom'; did you mean 'who'\?"),
    (GOOD, {"cluster": "region"}, r"There is no column 'region'; the columns are 'who'"),
    (GOOD, {"formula": "y ~ xx"}, r"There is no column 'xx'; did you mean 'x'\?"),
    (GOOD, {"formula": "z ~ x"}, r"There is no column 'z'"),
    (GOOD, {"client": None}, r"Clusters were given without clients"),
    (GOOD, {"gamma": -1.0}, r"'gamma' parameter must lie in \[0, inf\). Got -1 instead"),
    (GOOD, {"lam": {"g": 1.0}}, r"'lam' parameter has no value for cluster 'h'"),
    (GOOD, {"solver": "magic"}, r"'solver' parameter must be one of 'auto', 'sweep', 'newton', 'l2gd', .* Got 'magic' instead"),
    (GOOD, {"baseline": "magic"}, r"'baseline' parameter must be one of"),
    (GOOD, {"reduction": "max"}, r"'reduction' parameter must be one of 'sum', 'mean'"),
    (GOOD, {"unseen": "ignore"}, r"'unseen' parameter must be one of 'parent', 'raise'"),
    (GOOD, {"tol": 0.0}, r"'tol' parameter must be a positive number"),
    (GOOD, {"max_iter": 0}, r"'max_iter' parameter must be a whole number"),
    (GOOD, {"formula": "zone ~ x"}, r"The response must be numbers"),
    (GOOD.with_columns(y=pl.Series(["1"] * 6)), {}, r"The response must be numbers"),
    (GOOD.with_columns(y=pl.Series([date(2020, 1, 1)] * 6)), {}, r"The response must be numbers"),
    (GOOD.with_columns(d=pl.Series([date(2020, 1, 1)] * 6)), {"formula": "y ~ d"}, r"Column 'd' holds date values; convert it"),
    (GOOD.with_columns(who=pl.Series([2**63] * 6, dtype=pl.UInt64)), {}, r"client ids are too large"),
    (GOOD.with_columns(who=pl.Series([1e20] * 6)), {}, r"client ids are too large"),
    (GOOD, {"formula": "y ~ x | zone"}, r"needs parentheses around its terms and its group"),
    (GOOD, {"formula": "y ~ I(9**9**9 * x)"}, r"The power .* needs a column"),
    (GOOD, {"formula": "y ~ y + x"}, r"The response 'y' is also on the right"),
    (GOOD.rename({"x": "Intercept"}), {"formula": "y ~ Intercept"}, r"rename it"),
    (
        GOOD.with_columns(x=pl.Series(["1", "2", "oops", "4", "5", "6"])),
        {},
        r"Column 'x' holds text that reads as numbers except 'oops' in row 2; convert it, or write C\(x\)",
    ),
    (
        GOOD.with_columns(x=pl.Series([f"2024-01-0{day}" for day in range(1, 7)])),
        {},
        r"Column 'x' holds dates, such as '2024-01-01'; make a column of numbers .* C\(x\)",
    ),
    (GOOD.with_columns(who=pl.Series([[1]] * 6)), {}, r"client ids must be integers, text, booleans or dates"),
]


@pytest.mark.parametrize(("frame", "settings", "message"), CASES)
def test_tables(frame, settings, message):
    chosen = {"client": "who", "cluster": "group", "formula": "y ~ x", **settings}
    with pytest.raises(ValueError, match=message):
        HierarchicalRegressor(**chosen).fit(frame)


def test_text_columns_without_a_formula():
    with pytest.raises(
        ValueError, match=r"Column 'zone' holds string values \(such as 'u'\), not numbers; name it in a formula"
    ):
        HierarchicalRegressor(client="who", cluster="group").fit(GOOD.drop("y"), GOOD["y"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"y": np.zeros(5)}, r"5 values of the response for 6 rows"),
        ({"client": np.zeros(4)}, r"There are 4 client ids for 6 rows"),
        ({"cluster": np.zeros((6, 2))}, r"cluster ids must be one-dimensional"),
        ({"weights": np.ones(3)}, r"3 values of the weights for 6 rows"),
        ({"terms": ["a"]}, r"X has 2 columns, but 1 terms are named"),
        ({"X": np.zeros(6)}, r"X must have two dimensions"),
        ({"client": [1, "a", 2, 3, 4, 5]}, r"client ids mix int and str \(such as 1 and 'a'\)"),
    ],
)
def test_shapes_of_arrays(arguments, message):
    given = {"X": np.ones((6, 2)), "y": np.zeros(6), "client": np.arange(6), "cluster": np.zeros(6), **arguments}
    with pytest.raises(ValueError, match=message):
        GroupedData.from_arrays(given.pop("X"), given.pop("y"), given.pop("client"), given.pop("cluster"), **given)


@pytest.mark.parametrize(
    ("estimator", "y", "message"),
    [
        (HierarchicalClassifier, ["a"] * 6, r"one class only, 'a'"),
        (HierarchicalClassifier, list("abcabc"), r"Only binary classification is supported.*'a', 'b', 'c'"),
        (HierarchicalClassifier, ["a", None, "b", "a", "b", "a"], r"The response is missing \(NaN\) in row 1"),
        (
            HierarchicalPoissonRegressor,
            [1, 2, -3, 0, 1, 1],
            r"The response is -3 in row 2 \(client 'b'\); the poisson family takes counts",
        ),
        (HierarchicalPoissonRegressor, [0] * 6, r"The response is 0 in every row"),
        (HierarchicalRegressor, ["1", "x", "2", "3", "4", "5"], r"The response must be numbers, but is 'x' in row 1"),
    ],
)
def test_responses_that_the_family_cannot_have(estimator, y, message):
    with pytest.raises(ValueError, match=message):
        estimator(client="who", cluster="group", formula="x").fit(GOOD, pl.Series(y, strict=False))


def test_missing_classes_of_pandas():
    y = pd.Series([True, False, None, True, False, True], dtype="boolean")
    with pytest.raises(ValueError, match=r"The response is missing \(NaN\) in row 2"):
        HierarchicalClassifier(client="who", formula="x").fit(GOOD, y)


def test_names_and_positions_do_not_mix():
    with pytest.raises(ValueError, match=r"'cluster' parameter is a position, others are names"):
        HierarchicalRegressor(client="who", cluster=1, formula="y ~ x").fit(GOOD)
    with pytest.raises(ValueError, match=r"'client', 'cluster' name the same column"):
        HierarchicalRegressor(client=0, cluster=0).fit(np.ones((4, 3)), np.ones(4))
    with pytest.raises(ValueError, match=r"X is a data frame: give the 'client' parameter as a column's name"):
        HierarchicalRegressor(client=0).fit(GOOD[["who", "x"]], GOOD["y"])
    with pytest.raises(ValueError, match=r"Column names must be text; got 0"):
        HierarchicalRegressor(client="c").fit(pd.DataFrame({0: [1.0, 2.0], "c": [1, 2]}), [1.0, 2.0])


def test_seeds_are_whole_numbers():
    with pytest.raises(ValueError, match=r"seed \(random_state\) must be a whole number >= 0. Got -1"):
        HierarchicalRegressor(client="who", formula="y ~ x", random_state=-1).fit(GOOD)


def test_missing_client_setting_warns_with_a_formula_too():
    with pytest.warns(UserWarning, match="No clients were named"):
        HierarchicalRegressor(formula="y ~ x").fit(GOOD)


def test_clients_that_move_to_unknown_clusters_and_empty_columns():
    model = HierarchicalRegressor(client="who", cluster="group", formula="y ~ x").fit(GOOD)
    with pytest.raises(ValueError, match=r"Client 'a' was in cluster 'g' in training but row 0 puts it in 'new'"):
        model.predict(with_value("group", 0, "new"))
    pandas = pd.DataFrame(GOOD.to_dict(as_series=False))
    np.testing.assert_allclose(model.predict(pandas.assign(who=np.nan)), model.predict(GOOD, level="cluster"))
    np.testing.assert_allclose(model.predict(pandas.assign(who=np.nan, group=np.nan)), model.predict(GOOD, level="global"))


def test_the_response_is_given_once():
    model = HierarchicalRegressor(client="who", formula="y ~ x")
    with pytest.raises(ValueError, match="The response is given twice"):
        model.fit(GOOD, GOOD["y"] + 1)
    with pytest.raises(ValueError, match="requires y to be passed"):
        HierarchicalRegressor(client="who").fit(GOOD)


def test_prediction_checks_its_input_too():
    model = HierarchicalRegressor(client="who", cluster="group", formula="y ~ x").fit(GOOD)
    with pytest.raises(ValueError, match=r"Column 'x' is NaN in row 3"):
        model.predict(with_value("x", 3, None))
    with pytest.raises(ValueError, match=r"There is no column 'x'"):
        model.predict(GOOD.drop("x"))
    with pytest.raises(ValueError, match=r"There is no column 'who'"):
        model.predict(GOOD.drop("who"))
    with pytest.raises(ValueError, match=r"'level' parameter must be one of 'client', 'cluster', 'global'"):
        model.predict(GOOD, level="county")
    with pytest.raises(ValueError, match=r"X must be a data frame"):
        model.predict(np.ones((3, 2)))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.csv", None, r"There is no file '.*gone.csv'; check the path"),
        ("bad.parquet", b"not parquet", r"bad.parquet' cannot be read"),
        ("table.xlsx", b"", r"must end in .parquet, .csv"),
        ("empty.csv", b"", r"empty.csv' cannot be read"),
        ("folder.csv", "folder", r"folder.csv' is a folder; give a file"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, content, message):
    path = tmp_path / name
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_table(path)


def test_every_message_is_short_and_ends_with_a_full_stop():
    """The command line prints the messages after 'covey:'."""
    for frame, settings, _ in CASES:
        with pytest.raises(ValueError, match=r".") as caught:
            HierarchicalRegressor(**{"client": "who", "cluster": "group", "formula": "y ~ x", **settings}).fit(frame)
        text = str(caught.value)
        assert "\n" not in text
        assert text[0].isupper() or text[0].isdigit()
        assert text.endswith((".", "?"))
        assert len(text) < 260
