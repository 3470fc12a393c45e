"""Sites whose tables an engine holds: the models of a fit in memory, from sums by client, under the same rules."""

from __future__ import annotations

import duckdb
import numpy as np
import polars as pl
import pytest

from covey.engines.warehouse import open_table
from covey.errors import FederationError
from covey.federation.operator.settings import RunSettings
from covey.federation.site.engine import draft_rows
from covey.federation.site.policy import Policy
from covey.federation.site.release import weak_sums
from covey.federation.site.site import Site
from covey.nodes.layout import lay_out
from covey.problem.problem import Spec, resolve
from covey.records import decode
from tests.federation.sites import assert_same, by_turns, fit, in_memory, sites_of, spec, table

FRAME = table(71, clients=24).with_columns(year=2010 + 5 * pl.col("x"))
BARS = Spec(formula="y ~ year + z + (1 + year | cluster/client)")
LEARNS = {"gamma": None, "lam": None}


def in_duckdb(part: pl.DataFrame, folder) -> duckdb.DuckDBPyRelation:
    with duckdb.connect(folder / "site.duckdb") as connection:
        connection.sql("CREATE SCHEMA raw")
        connection.sql("CREATE TABLE raw.visits AS SELECT * FROM part")
    return open_table(folder / "site.duckdb", "raw.visits")


def in_files(part: pl.DataFrame, folder) -> pl.LazyFrame:
    """A client's rows are in several files."""
    for at in range(3):
        part[at::3].write_parquet(folder / f"{at}.parquet")
    return open_table(folder / "*.parquet")


def in_shards(part: pl.DataFrame, folder) -> pl.LazyFrame:
    return open_table(lay_out(part.lazy(), folder / "shards", "client", 3))


def held(parts: dict[str, pl.DataFrame], folder) -> dict:
    """The first site has a DuckDB database, the second files, the third shards."""
    made = {}
    for (name, part), keep in zip(parts.items(), (in_duckdb, in_files, in_shards), strict=True):
        (folder / name).mkdir()
        made[name] = keep(part, folder / name)
    return made


@pytest.mark.parametrize(
    "asked",
    [
        spec(),
        spec(formula="log(year) ~ x:z + I(x**2) + year", nested=True),
        spec(cluster=None, lam=None),
        spec(na="drop", **LEARNS),
        BARS,
        spec(weights="weight"),
        spec(formula="y ~ scale(year) + z", standardize=True),
        spec("bernoulli", formula="y ~ x + z"),
    ],
    ids=["penalties", "expressions", "no clusters", "drop", "bars", "weights", "scale", "logistic"],
)
def test_the_models_of_a_fit_in_memory(asked, tmp_path):
    frame = FRAME if asked.family == "gaussian" else table(72, "bernoulli", clients=24)
    if asked.na == "drop":
        frame = frame.with_columns(x=pl.when(pl.int_range(pl.len()) % 7 > 0).then("x"))
    sites = sites_of(held(by_turns(frame, 3), tmp_path))
    outcome = fit(sites, asked)
    assert_same(outcome, sites, in_memory(frame, asked))
    by_sums = asked.family == "gaussian" and asked.weights is None and not asked.standardize
    assert all((site.node(outcome.run).data.sums is not None) == by_sums for site in sites.values())


def test_masked_sums_are_those_of_tables_in_memory(tmp_path):
    sites = sites_of(held(by_turns(FRAME, 3), tmp_path))
    outcome = fit(sites, spec(), settings=RunSettings(retries=1, timeout=1.0, secure=True))
    assert_same(outcome, sites, in_memory(FRAME, spec()))


def few(name: str) -> pl.DataFrame:
    """Twelve clients in each of two clusters; a column in which few clients differ from the rest."""
    frame = table(73, clients=24, clusters=2).with_columns(
        usual=pl.col("x"),
        one=(pl.col("client") == "c3").cast(pl.Float64),
        shifted=2000.0 + 3.0 * pl.col("client").is_in(["c3", "c5"]),
        large=pl.col("x") * pl.when(pl.col("client") == "c4").then(1e3).otherwise(1.0),
        year=2000.0 + 8 * pl.col("x"),
    )
    return frame.with_columns(term=pl.col(name))


@pytest.mark.parametrize("name", ["usual", "year", "one", "shifted", "large"])
@pytest.mark.parametrize("keep", [in_duckdb, in_files])
def test_the_same_sums_are_weak_as_on_rows(keep, name, tmp_path):
    """A dishonest coordinator asks for a column about one client or two; the rules find it in the sums by client."""
    asked = spec(formula="y ~ term")
    draft = resolve(asked)
    lazy, rows = (draft_rows(each, draft)[0] for each in (keep(few(name), tmp_path), few(name)))
    assert lazy.sums is not None
    found, wanted = ({(str(w.cell), w.term, w.clients, round(w.share, 6)) for w in weak_sums(d, 5, 0.5)} for d in (lazy, rows))
    assert found == wanted
    assert bool(found) == (name not in ("usual", "year"))
    differ = [str(each) for each in weak_sums(rows, 5, 1.0) if each.rare]
    assert bool(differ) == (name == "shifted")
    assert all("2 clients differ from the others" in each for each in differ)


@pytest.mark.parametrize(("name", "rule"), [("one", "minimum"), ("shifted", "minimum"), ("large", "share")])
def test_a_site_on_an_engine_refuses_sums_about_few_clients(name, rule, tmp_path):
    limits = {"minimum": 5, "share": 1.0} if rule == "minimum" else {"minimum": 1, "share": 0.5}
    sites = sites_of({"s": in_duckdb(few(name), tmp_path)}, **limits)
    with pytest.raises(FederationError, match=f"rule '{rule}'"):
        fit(sites, spec(formula="y ~ term"))


def test_a_site_on_an_engine_refuses_a_category_of_few_clients(tmp_path):
    rare = FRAME.with_columns(z=pl.when(pl.col("client") == "c0").then(pl.lit("rare")).otherwise("z"))
    sites = sites_of({"s": in_files(rare, tmp_path)}, minimum=2)
    with pytest.raises(FederationError, match="Column 'z' has a value that fewer than 2 clients"):
        fit(sites, spec())


def test_a_value_that_most_clients_share_stands_for_the_median():
    """Two clients with most of the rows differ from the others: their cell's median would not show it."""
    frame = table(74, clients=12, clusters=1)
    many = pl.concat([frame, *[frame.filter(pl.col("client").is_in(["c0", "c1"]))] * 9])
    many = many.with_columns(term=pl.when(pl.col("client").is_in(["c0", "c1"])).then("x").otherwise(7.0))
    data, _ = draft_rows(many.lazy(), resolve(spec(formula="y ~ term")))
    assert ("term", 2) in {(w.term, w.clients) for w in weak_sums(data, 5, 0.9)}


@pytest.mark.parametrize("change", [{}, {"x": pl.col("x") + 1e-4}, {"client": "new " + pl.col("client")}])
def test_a_restarted_site_goes_on_unless_its_table_has_changed(change, tmp_path):
    """The rows come in another order, so that the engine's sums differ by rounding."""

    class Reopened:
        def answer(self, message):
            later = decode(message).exchange >= 2
            part = FRAME.with_columns(**change).sample(fraction=1.0, shuffle=True, seed=1).lazy() if later else FRAME.lazy()
            return Site("s", lambda _: part, home=tmp_path, policy=Policy(1)).answer(message)

    asked = spec(**LEARNS)
    if change:
        with pytest.raises(FederationError, match="The table has changed since the run began"):
            fit({"s": Reopened()}, asked)
        return
    outcome = fit({"s": Reopened()}, asked)
    np.testing.assert_allclose(outcome.model.wbar, in_memory(FRAME, asked).wbar, rtol=0, atol=1e-10)
