"""Tables that an engine holds: the same fit from sums as from rows, the same mistakes reported, and what cannot be pushed."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import duckdb
import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import covey
from covey import CoveyError, Spec
from covey.nodes import look
from tests.cli.shell import inside


def engines(table):
    """The same rows, lazily, in Polars and in DuckDB."""
    return {"polars": table.lazy(), "duckdb": duckdb.from_arrow(table.to_arrow())}


def assert_equal(one, two, precision=1e-10):
    """The same clients, coefficients, variances and intervals."""
    assert one.terms_ == two.terms_
    assert one.clients_.tolist() == two.clients_.tolist()
    assert one.model_.rows.tolist() == two.model_.rows.tolist()
    size = 1e-3 + np.abs(one.coef_).max(axis=0)
    assert np.abs((one.coef_ - two.coef_) / size).max() < precision
    assert np.abs((one.global_coef_ - two.global_coef_) / size).max() < precision
    if one.model_.learned is None:
        return
    first, second = one.components_, two.components_
    assert second.log_likelihood == pytest.approx(first.log_likelihood, rel=1e-10, abs=1e-8)
    if first.residual is not None:
        assert second.residual == pytest.approx(first.residual, rel=max(1e-9, precision))
    assert [test.statistic for test in second.tests] == pytest.approx([test.statistic for test in first.tests], abs=1e-6)
    columns = ["std_error", "lower", "upper", "df"]
    shown = [model.coef_frame("global").select(columns).to_numpy() for model in (one, two)]
    assert shown[1] == pytest.approx(shown[0], rel=max(1e-7, 10 * precision))


def table_of(seed, rows, clients, shuffle=True):
    """Clients in clusters, with badly scaled columns (years, incomes), categories, weights and frequencies."""
    rng = np.random.default_rng(seed)
    client = np.sort(rng.integers(clients, size=rows))
    cluster = client % 3
    year, income = rng.integers(1995, 2025, rows), rng.lognormal(11.0, 0.5, rows)
    zone = rng.choice(["east", "north", "west"], rows)
    effect = rng.normal(size=clients)[client] + 0.5 * rng.normal(size=3)[cluster]
    y = 3.0 + effect + 0.05 * (year - 2010) + 2e-6 * income + (zone == "west") + rng.normal(size=rows)
    table = pl.DataFrame(
        {"y": y, "year": year, "income": income, "zone": zone, "client": client, "cluster": [f"g{j}" for j in cluster]}
    ).with_columns(w=pl.Series(rng.uniform(0.5, 2.0, rows)), f=pl.Series(rng.integers(0, 3, rows)))
    return table.sample(fraction=1.0, shuffle=True, seed=seed) if shuffle else table


FORMULAS = [
    Spec(formula="y ~ year + income + (1 | cluster/client)"),
    Spec(formula="y ~ zone + log(income) + (1 + year | client)"),
    Spec(formula="y ~ zone * year", client="client", cluster="cluster", gamma=2.0, lam=1.0),
    Spec(formula="y ~ 0 + zone + scale(income) + I(year - 2000) + (1 | client)", weights="w"),
    Spec(formula="log(y + 40) ~ C(zone, contr.sum) + center(year) + offset(log(income))", client="client", gamma=1.0),
    Spec(formula="y ~ year + (1 | client)", frequency="f", weights="w"),
    Spec(formula="y ~ income", client="client", cluster="cluster", gamma=0.5, standardize=True),
    Spec(formula="y ~ income", client="client", gamma=0.5, reduction="mean", weights="w"),
    Spec(formula="y ~ zone", client="client", baseline="single-model"),
    Spec(formula="y ~ zone", client="client", baseline="locally-trained"),
]


@settings(max_examples=12)
@given(
    seed=st.integers(0, 10_000),
    clients=st.integers(9, 30),
    at=st.integers(0, len(FORMULAS) - 1),
    ends=st.lists(st.integers(0, 400), max_size=4),
)
def test_the_same_fit_from_sums_as_from_rows(tmp_path_factory, seed, clients, at, ends):
    """For any partition of the rows into files, some of them empty."""
    table, folder = table_of(seed, 400, clients), tmp_path_factory.mktemp("rows")
    spec = replace(FORMULAS[at], tests=at == 0)
    memory = covey.fit(table, spec)
    for start, end in pairwise([0, *sorted(ends), 400]):
        table[start:end].write_parquet(folder / f"{start:03d}-{end:03d}-{len(list(folder.iterdir()))}.parquet")
    for lazy in (pl.scan_parquet(folder / "*.parquet"), duckdb.sql(f"FROM '{folder}/*.parquet'")):
        assert_equal(memory, covey.fit(lazy, spec))


@pytest.mark.parametrize("at", range(len(FORMULAS)))
def test_every_formula(at):
    table = table_of(at, 500, 15)
    memory = covey.fit(table, FORMULAS[at])
    assert_equal(memory, covey.fit(engines(table)["duckdb"], FORMULAS[at]))


def test_a_table_without_clients():
    table, spec = table_of(9, 200, 10), Spec(formula="y ~ year + zone")
    for lazy in engines(table).values():
        assert_equal(covey.fit(table, spec), covey.fit(lazy, spec))


@pytest.mark.parametrize("names", [("rows", "usable", "weight"), ("one", "times", "rows"), ("z0", "s0", "counted")])
def test_columns_may_have_the_names_of_sums(names):
    table = table_of(10, 300, 10).rename(dict(zip(("client", "zone", "w"), names, strict=True)))
    spec = Spec(formula=f"y ~ {names[1]} + year + (1 | {names[0]})", weights=names[2], frequency="f")
    for lazy in engines(table).values():
        assert_equal(covey.fit(table, spec), covey.fit(lazy, spec))


@pytest.mark.filterwarnings("ignore::covey.ConvergenceWarning")  # few iterations
@pytest.mark.parametrize("solver", ["proxskip", "l2gd", "one_coin"])
def test_solvers_that_draw_no_rows_take_a_lazy_table(solver):
    table = table_of(11, 120, 4).with_columns(year=(pl.col("year") - 2010) / 10)
    spec = Spec(formula="y ~ year", client="client", gamma=1.0, reduction="mean", solver=solver, max_iter=50)
    assert_equal(covey.fit(table, spec), covey.fit(table.lazy(), spec))


def test_any_partition_into_files(tmp_path):
    """A client's rows may be in several files, in any order."""
    table, folder = table_of(1, 600, 20), tmp_path / "rows"
    folder.mkdir()
    for at in range(5):
        table[at::5].write_parquet(folder / f"{at}.parquet")
    spec = FORMULAS[0]
    for path in (folder, f"{folder}/*.parquet"):
        assert_equal(covey.fit(table, spec), covey.fit(path, spec))


def test_two_queries(monkeypatch):
    asked = []
    real = look.collected
    for module in ("covey.nodes.look.collected", "covey.nodes.lazy.collected"):
        monkeypatch.setattr(module, lambda query, *rows: (asked.append(query), real(query, *rows))[1])
    covey.fit(table_of(2, 500, 12).lazy(), FORMULAS[1])
    assert len(asked) == 2


def test_updates_of_a_model_by_a_lazy_table():
    table, new = table_of(3, 500, 12), table_of(4, 60, 15)
    model = covey.fit(table, FORMULAS[0])
    assert_equal(model.update(new), model.update(new.lazy()))
    with pytest.raises(CoveyError, match=r"'zone'.*'south'.*not see"):
        covey.fit(table, FORMULAS[1]).update(new.with_columns(zone=pl.lit("south")).lazy())


def test_arrays_beside_a_lazy_table_and_intervals_of_one_get_a_sentence():
    table = table_of(8, 200, 10)
    with pytest.raises(CoveyError, match="response, ids and weights in columns"):
        covey.HierarchicalRegressor(gamma=1.0).fit(table.lazy(), table["y"], client=table["client"])
    with pytest.raises(CoveyError, match=r"lazy table \(polars\), and rows are needed here; .*X.collect\(\)"):
        covey.fit(table, FORMULAS[0]).predict_interval(table.lazy())


def test_missing_values_are_dropped_and_counted():
    table = table_of(5, 500, 12).with_columns(
        year=pl.when(pl.int_range(500) % 50 == 0).then(None).otherwise(pl.col("year")),
        zone=pl.when(pl.int_range(500) % 70 == 0).then(None).otherwise(pl.col("zone")),
    )
    spec = Spec(formula="y ~ year + zone + (1 | client)", na="drop")
    memory = covey.fit(table, spec)
    for lazy in engines(table).values():
        found = covey.fit(lazy, spec)
        assert_equal(memory, found)
        assert str(found.model_.dropped) == str(memory.model_.dropped)


def _with(column, value, dtype=None):
    return lambda table: table.with_columns(
        pl.when(pl.int_range(len(table)) < 3).then(pl.lit(value, dtype=dtype)).otherwise(pl.col(column)).alias(column)
    )


MISTAKES = [
    (_with("income", None, pl.Float64), {}, ["3 rows", "client", "'income'", "NaN", "fill", "na='drop'"]),
    (_with("income", float("nan")), {}, ["3 rows", "client", "'income'", "NaN", "fill"]),
    (_with("income", float("inf")), {}, ["3 rows", "client", "'income'", "inf", "fill"]),
    (_with("y", float("-inf")), {}, ["3 rows", "client", "'y'", "inf"]),
    (_with("income", -1.0), {"formula": "y ~ log(income) + (1 | client)"}, ["3 rows", "client", "log(income)", "finite"]),
    (_with("zone", None, pl.String), {"formula": "y ~ zone + (1 | client)"}, ["3 rows", "'zone'", "category"]),
    (_with("client", None, pl.Int64), {}, ["3 rows", "no client id", "'client'", "na='drop'"]),
    (_with("w", -1.0), {"weights": "w"}, ["3 rows", "negative", "'w'"]),
    (_with("w", 0.5), {"frequency": "w"}, ["rows", "(such as client", "'w'", "whole number"]),
    (
        _with("cluster", "elsewhere"),
        {"client": "client", "cluster": "cluster"},
        ["Client", "clusters", "'elsewhere'", "one cluster"],
    ),
    (lambda table: table.head(0), {}, ["no rows"]),
    (lambda table: table.rename({"income": "incomes"}), {}, ["'income'", "'incomes'"]),
    (lambda table: table.with_columns(y=pl.col("zone")), {}, ["'y'", "numbers"]),
    (lambda table: table, {"formula": "y ~ bs(income, df=4) + (1 | client)"}, ["bs(income, df=4)", "covey shard"]),
    (lambda table: table, {"formula": "y ~ I(income % 2) + (1 | client)"}, ["income % 2", "covey shard"]),
    (lambda table: table, {"formula": "zone ~ income", "family": "bernoulli"}, ["bernoulli", "covey shard"]),
    (lambda table: table, {"formula": "y ~ income", "penalty": "cv"}, ["cv", "in memory", "gamma and lam"]),
    (
        lambda table: table,
        {"formula": "y ~ income", "gamma": 1.0, "frequency": "f", "standardize": True},
        ["standardize=True", "frequency=", "in memory"],
    ),
    (lambda table: table, {"formula": None, "gamma": 1.0}, ["formula", "y"]),
    (
        lambda table: table,
        {"formula": "y ~ income", "gamma": 1.0, "solver": "al2sgd_plus"},
        ["al2sgd_plus", "rows", "covey shard"],
    ),
]


@pytest.mark.parametrize("engine", ["polars", "duckdb"])
@pytest.mark.parametrize(("spoil", "setting", "facts"), MISTAKES)
def test_mistakes_are_found_by_the_engine(engine, spoil, setting, facts):
    spec = Spec(**{"formula": "y ~ income + (1 | client)", **setting})
    if spec.formula is None or "|" not in spec.formula:
        spec = replace(spec, client="client")
    table = spoil(table_of(6, 100, 10))
    with pytest.raises(CoveyError) as caught:
        covey.fit(engines(table)[engine], spec)
    assert [fact for fact in facts if fact not in str(caught.value)] == [], str(caught.value)


@pytest.mark.parametrize("column", ["income", "client"])
def test_all_engines_name_the_smallest_id(column):
    """Of the clients with missing values, or without an id of the client of their clusters."""
    table = table_of(6, 100, 10)
    bad = table.with_columns(pl.when(pl.int_range(100) % 3 == 0).then(None).otherwise(pl.col(column)).alias(column))
    ids = bad.filter(pl.col(column).is_null())["client" if column == "income" else "cluster"]
    for lazy in engines(bad).values():
        with pytest.raises(CoveyError, match=f"such as {ids.name} {ids.min()!r}"):
            covey.fit(lazy, Spec(formula="y ~ income + (1 | cluster/client)"))


def test_the_command_line_fits_patterns_and_databases(tmp_path):
    table = table_of(7, 400, 12)
    table.write_parquet(tmp_path / "a.parquet")
    with duckdb.connect(tmp_path / "house.duckdb") as connection:
        connection.from_arrow(table.to_arrow()).create("visits")
    formula = "y ~ year + (1 | client)"

    def shown(*arguments, check=True):
        done = inside("fit", *arguments, cwd=tmp_path, check=check)
        return done.stdout if check else (done.returncode, done.stderr)

    plain = shown("a.parquet", formula, "--holdout", "0")
    assert shown("*.parquet", formula) == plain
    assert shown("a.parquet", formula, "--lazy") == plain
    assert shown("house.duckdb", formula, "--table", "visits") == plain
    for arguments in (("house.duckdb", formula), ("house.duckdb", formula, "--table", "visit")):
        code, said = shown(*arguments, check=False)
        assert (code, "visits" in said) == (2, True)
    assert shown("a.parquet", formula, "--table", "visits", check=False)[0] == 2
    (tmp_path / "empty").mkdir()
    for arguments, said in ((("b*.parquet",), "No file matches 'b*.parquet'"), (("empty",), "'empty' has no Parquet files")):
        assert said in shown(*arguments, formula, check=False)[1]
