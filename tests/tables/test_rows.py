"""From tables and arrays to GroupedData; splits and folds."""

from __future__ import annotations

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given

from covey import CoveyError, GroupedData, read_table
from covey.problem.problem import Spec, resolve
from covey.problem.rows import read_rows
from covey.tree.hierarchy import as_labels, encode, lookup, segment_sum
from tests.conftest import random_problem, seeds

TABLE = {
    "who": ["b", "a", "c", "b", "a", "c"],
    "group": ["g", "h", "g", "g", "h", "g"],
    "x": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    "zone": ["u", "r", "u", "r", "u", "r"],
    "y": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6],
}
LIBRARIES = {"pandas": pd.DataFrame, "polars": pl.DataFrame, "pyarrow": pa.table}


@given(seeds)
def test_rows_are_sorted_by_cluster_then_client(seed):
    problem = random_problem(seed)
    data = problem.data
    client = data.hierarchy.clients[data.client_of_row]
    cluster = data.hierarchy.clusters[data.hierarchy.parent][data.client_of_row]
    assert sorted(zip(cluster, client, strict=True)) == list(zip(cluster, client, strict=True))
    order = np.lexsort((np.arange(data.n_rows), problem.client, problem.cluster))
    np.testing.assert_array_equal(problem.X[order], data.X)
    np.testing.assert_array_equal(problem.y[order], data.y)
    np.testing.assert_array_equal(problem.weights[order], data.weights)
    np.testing.assert_array_equal(problem.client[order], client)
    assert data.X.flags.c_contiguous


@pytest.mark.parametrize("library", LIBRARIES)
def test_any_frame_gives_the_same_data(library):
    frame = LIBRARIES[library](TABLE)
    spec = Spec(client="who", cluster="group", formula="y ~ x * zone + log(x)")
    data, problem = read_rows(frame, resolve(spec))
    assert problem.terms == ("Intercept", "x", "zone[T.u]", "log(x)", "x:zone[T.u]")
    assert data.hierarchy.clients.tolist() == ["b", "c", "a"]
    np.testing.assert_array_equal(data.y, [0.1, 0.4, 0.3, 0.6, 0.2, 0.5])
    np.testing.assert_allclose(data.X[0], [1, 1, 1, 0, 1])


def test_sorted_input_is_not_copied():
    X = np.arange(6.0).reshape(3, 2)
    assert GroupedData.from_arrays(X, np.zeros(3), ["a", "a", "b"]).X is X


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".csv.gz", ".tsv"])
def test_files(tmp_path, suffix):
    path = tmp_path / f"table{suffix}"
    frame = pl.DataFrame(TABLE)
    if suffix == ".parquet":
        frame.write_parquet(path)
    elif suffix == ".csv.gz":
        frame.to_pandas().to_csv(path, index=False)
    else:
        frame.write_csv(path, separator="\t" if suffix == ".tsv" else ",")
    assert read_table(path).equals(frame)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3, 1, 2], [1, 2, 3]),
        (["b", "a", "b"], ["a", "b"]),
        (np.array([10.0, 2.0]), [2, 10]),
        ([True, False], [False, True]),
        (pd.Categorical(["z", "y"]), ["y", "z"]),
        (np.array([2**40, 5]), [5, 2**40]),
        (pl.Series(["b", "a"], dtype=pl.Categorical), ["a", "b"]),
        (pd.Series([2, None, 1], dtype="Int64").dropna(), [1, 2]),
        (np.array(["2020-01-02", "2020-01-01"], dtype="datetime64[D]"), None),
    ],
)
def test_ids_of_many_kinds(values, expected):
    labels = as_labels(values, "client")
    ids, codes = encode(values, "client")
    if expected is not None:
        assert ids.to_list() == expected
    assert [ids[int(code)] for code in codes] == labels.to_list()
    np.testing.assert_array_equal(lookup(labels, ids, "client"), codes)


def test_categories_keep_the_type_of_their_ids():
    assert encode(pd.Series([2, 1, 2], dtype="category"), "client")[0].to_list() == [1, 2]
    assert encode(pa.chunked_array([["b", "a"]]).dictionary_encode(), "client")[0].to_list() == ["a", "b"]


def test_large_whole_numbers_stay_different():
    ids, _ = encode(np.array([2**53, 2**53 + 1]), "client")
    assert lookup(as_labels(np.array([0.5, 2.0**52]), "client"), ids, "client").tolist() == [-1, -1]
    assert lookup(as_labels(np.array([2**53 + 1]), "client"), ids, "client").tolist() == [1]


def test_a_file_with_semicolons_is_refused_with_the_fix(tmp_path):
    path = tmp_path / "machines.csv"
    path.write_text('"Worker";"score"\n"1";52,8\n')
    with pytest.raises(CoveyError, match=r"semicolons .* decimal_comma=True"):
        read_table(path)


def test_ids_of_csv_files_keep_leading_zeros(tmp_path):
    (tmp_path / "t.csv").write_text("zip,n,x\n01234,1,NA\n1234,2,2.5\n02138,3,3.5\n")
    frame = read_table(tmp_path / "t.csv", ids=["zip", "n"])
    assert frame["zip"].to_list() == ["01234", "1234", "02138"]
    assert frame["n"].to_list() == [1, 2, 3]
    assert frame["x"].to_list() == [None, 2.5, 3.5]
    assert read_table(tmp_path / "t.csv", text=["n"])["n"].to_list() == ["1", "2", "3"]


def test_lookup_of_missing_and_unseen_ids_fails():
    ids, _ = encode([1, 2], "client")
    assert lookup(as_labels([2.0, float("nan"), 7.0], "client"), ids, "client").tolist() == [1, -1, -1]


@given(seeds)
def test_split_keeps_a_row_of_every_client_and_loses_no_row(seed):
    data = random_problem(seed).data
    train, test = data.split(0.3, seed)
    assert train.n_rows + test.n_rows == data.n_rows
    assert (train.rows_per_client >= 1).all()
    np.testing.assert_array_equal(train.rows_per_client + test.rows_per_client, data.rows_per_client)
    assert sorted([*train.y.tolist(), *test.y.tolist()]) == sorted(data.y.tolist())
    again, _ = data.split(0.3, seed)
    np.testing.assert_array_equal(again.y, train.y)


def test_split_holds_out_the_requested_share_of_small_clients():
    data = GroupedData.from_arrays(np.ones((9000, 1)), np.zeros(9000), np.arange(9000) // 3)
    held = data.split(0.2, 0)[1].n_rows
    assert abs(held / 9000 - 0.2) < 0.02


@given(seeds)
def test_folds_are_balanced_within_clients(seed):
    data = random_problem(seed, max_rows=20).data
    fold = data.folds(4, seed)
    for i in range(data.n_clients):
        counts = np.bincount(fold[data.client_of_row == i], minlength=4)
        assert counts.max() - counts.min() <= 1


def test_segments_may_be_empty():
    np.testing.assert_array_equal(segment_sum(np.arange(4.0), np.array([0, 0, 3, 3, 4])), [0, 3, 0, 3])


def test_views_of_clients_keep_the_clusters():
    data = random_problem(9).data
    part = data.clients(1, 3)
    assert part.n_clients == 2
    assert part.n_clusters == data.n_clusters
    np.testing.assert_array_equal(part.hierarchy.parent, data.hierarchy.parent[1:3])
    np.testing.assert_array_equal(part.y, data.y[data.client_ptr[1] : data.client_ptr[3]])
