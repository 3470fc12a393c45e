"""Shards on disk: every family and solver as in memory, checkpoints, and what lays a table out."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import duckdb
import numpy as np
import polars as pl
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import covey
from covey import CoveyError, Spec
from covey.engines import warehouse
from covey.fitting.fit import fit
from covey.nodes.layout import lay_out, parts_of
from covey.nodes.network import InMemory
from covey.nodes.shards import Shards, open_shards
from covey.problem.problem import resolve
from covey.problem.rows import read_rows
from tests.cli.shell import inside
from tests.nodes.test_lazy import assert_equal, table_of


def counts_of(seed, rows=400, clients=12):
    table, rng = table_of(seed, rows, clients), np.random.default_rng(seed)
    table = table.with_columns(x=pl.Series(rng.normal(size=rows)))
    margin = 0.5 * table["x"].to_numpy() + 0.4 * rng.normal(size=clients)[table["client"].to_numpy()]
    return table.with_columns(
        count=pl.Series(rng.poisson(np.exp(margin))),
        yes=pl.Series(np.where(rng.random(rows) < 1 / (1 + np.exp(-margin)), "yes", "no")),
        size=pl.Series(rng.gamma(2.0, np.exp(margin) / 2.0) + 1e-3),
    )


MODELS = [
    Spec(formula="y ~ year + income + (1 | cluster/client)"),
    Spec(formula="y ~ zone * scale(income)", client="client", cluster="cluster", gamma=2.0, lam=1.0),
    Spec(formula="y ~ poly(year, 2)", client="client", gamma=2.0, standardize=True),
    Spec(formula="yes ~ x + zone", family="bernoulli", client="client", cluster="cluster", gamma=2.0, lam=1.0),
    Spec(formula="count ~ x", family="poisson", client="client", gamma={3: 5.0}),
    Spec(formula="count ~ x + (1 | client)", family="poisson"),
    Spec(formula="size ~ x + (1 | client)", family="gamma", weights="w"),
    Spec(formula="y ~ income", client="client", gamma=2.0, solver="al2sgd_plus", standardize=True, max_iter=300),
    Spec(formula="y ~ x", client="client", cluster="cluster", gamma=2.0, solver="apgd"),
]


@pytest.mark.filterwarnings("ignore::covey.errors.ConvergenceWarning")
@settings(max_examples=9)
@given(seed=st.integers(0, 10_000), at=st.integers(0, len(MODELS) - 1), shards=st.integers(1, 7), files=st.integers(1, 4))
@example(seed=1, at=0, shards=3, files=4)  # years and incomes as they are
def test_the_same_fit_on_any_shards(tmp_path_factory, seed, at, shards, files):
    """For any partition of the table into files, with a client's rows in several of them."""
    table, spec = counts_of(seed), replace(MODELS[at], tests=False)
    spec = replace(spec, gamma=2.0) if isinstance(spec.gamma, dict) else spec
    place = tmp_path_factory.mktemp("rows")
    for part in range(files):
        table[part::files].write_parquet(place / f"{part}.parquet")
    folder = lay_out(pl.scan_parquet(place / "*.parquet"), place / "shards", "client", shards)
    assert len(parts_of(folder)) <= shards
    assert_equal(covey.fit(table, spec), covey.fit(folder, spec))


@pytest.mark.filterwarnings("ignore::covey.errors.ConvergenceWarning")
@pytest.mark.parametrize("at", range(len(MODELS)))
def test_every_model(tmp_path, at):
    table, spec = counts_of(at), MODELS[at]
    if isinstance(spec.gamma, dict):
        spec = replace(spec, gamma={client: 1.0 + client for client in table["client"].unique()})
    folder = lay_out(table.lazy(), tmp_path / "shards", "client", 3)
    assert_equal(covey.fit(table, spec), covey.fit(folder, spec))


def test_a_shard_is_mapped_and_no_copy_of_rows_stays(tmp_path):
    folder = lay_out(counts_of(1).lazy(), tmp_path / "shards", "client", 4)
    with open_shards(folder, resolve(MODELS[6])) as (network, problem):
        fit(network, problem)
        for node in (shard.node for shard in network.holder.shards):
            assert isinstance(node.data.X, np.memmap)
            kept = [each for entry in node.cache.values() for each in (entry if isinstance(entry, tuple) else (entry,))]
            assert not [each for each in kept if getattr(each, "X", None) is not None]
    assert (tmp_path / "shards").exists()
    assert not [each for each in folder.iterdir() if each.name.startswith(".covey")]


@pytest.mark.filterwarnings("ignore::covey.errors.ConvergenceWarning")
@pytest.mark.parametrize(("at", "solver", "few", "many"), [(3, "newton", 2, 40), (7, "al2sgd_plus", 100, 200)])
def test_a_checkpoint_resumes_to_the_same_bits(tmp_path, at, solver, few, many):
    folder = lay_out(counts_of(2).lazy(), tmp_path / "shards", "client", 3)

    def run(steps, **options):
        given = replace(MODELS[at], solver=solver, max_iter=steps, options=options or None)
        return covey.fit(folder, given)

    file = str(tmp_path / "run")
    run(few, checkpoint=file)
    assert np.array_equal(run(many, checkpoint=file).coef_, run(many).coef_)


def test_mistakes_on_shards(tmp_path):
    table = counts_of(3)
    folder = lay_out(table.lazy(), tmp_path / "shards", "client", 3)
    cases = [
        (Spec(formula="y ~ x", client="cluster", gamma=1.0), ["'client'", "'cluster'"]),
        (Spec(formula="y ~ x"), ["'client'", "no clients"]),
        (Spec(formula="y ~ nothing + (1 | client)"), ["'nothing'"]),
        (Spec(formula="y ~ bs(x, df=4) + (1 | client)"), ["bs(x, df=4)", "lower_bound"]),
        (Spec(formula="y ~ x", client="client", penalty="cv"), ["cv", "shards"]),
        (Spec(formula="y ~ x", client="client", baseline="single-model"), ["single-model", "shards"]),
        (Spec(formula="zone ~ x", family="bernoulli", client="client", gamma=1.0), ["binary"]),
    ]
    for spec, facts in cases:
        with pytest.raises(CoveyError) as caught:
            covey.fit(folder, spec)
        assert [fact for fact in facts if fact not in str(caught.value)] == [], str(caught.value)
    spoiled = table.with_columns(x=pl.when(pl.col("client") == 5).then(float("inf")).otherwise(pl.col("x")))
    bad = lay_out(spoiled.lazy(), tmp_path / "bad", "client", 3)
    with pytest.raises(CoveyError, match=r"'x' is infinite.*client 5.*shard="):
        covey.fit(bad, MODELS[4])
    one = lay_out(table.with_columns(yes=pl.lit("yes")).lazy(), tmp_path / "one", "client", 3)
    with pytest.raises(CoveyError, match="one class only"):
        covey.fit(one, MODELS[3])


def test_mistakes_about_engines(tmp_path):
    table, spec = counts_of(3, 60), MODELS[4]
    folder = lay_out(table.lazy(), tmp_path / "shards", "client", 2)
    cases = [
        (table, {"engine": "ray"}, "needs a folder of shards"),
        ("rows.parquet", {"engine": "ray"}, "'rows.parquet' is none"),
        (folder, {"engine": "spark"}, "must be one of 'ray'"),
        (folder, {"address": "auto"}, "add engine='ray'"),
    ]
    for rows, engine, fact in cases:
        with pytest.raises(CoveyError, match=fact):
            covey.fit(rows, spec, **engine)


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_the_sentence_says_how_to_install_it(tmp_path):
    folder = lay_out(counts_of(3, 60).lazy(), tmp_path / "shards", "client", 2)
    with pytest.raises(CoveyError, match=r"needs the package ray; .*pip install '\.\[ray\]'"):
        covey.fit(folder, MODELS[4], engine="ray")


def test_the_command_line(tmp_path):
    table = counts_of(4)
    table.write_parquet(tmp_path / "rows.parquet")
    inside("shard", "rows.parquet", "shards", "--client", "client", "--shards", "3", cwd=tmp_path)
    again = inside("shard", "rows.parquet", "shards", "--client", "client", cwd=tmp_path)
    assert "3 shards" in again.stderr
    assert inside("shard", "rows.parquet", "shards", "--client", "zone", cwd=tmp_path, check=False).returncode == 2
    assert inside("shard", "rows.parquet", "other", "--client", "clint", cwd=tmp_path, check=False).returncode == 2
    command = ["yes ~ x + zone", "--family", "bernoulli", "--client", "client", "--gamma", "2"]
    memory, shards = (inside("fit", data, *command, "--holdout", "0", cwd=tmp_path) for data in ("rows.parquet", "shards"))
    assert shards.stdout.splitlines()[:3] == memory.stdout.splitlines()[:3]
    assert shards.stdout.splitlines()[-3:] == memory.stdout.splitlines()[-3:]


def test_shards_of_a_table_that_has_changed_are_refused(tmp_path):
    table, arguments = counts_of(4, 60), ("shard", "rows", "shards", "--client", "client", "--shards", "2")
    (tmp_path / "rows").mkdir()
    table.write_parquet(tmp_path / "rows" / "a.parquet")
    inside(*arguments, cwd=tmp_path)
    inside(*arguments, cwd=tmp_path)
    fewer = inside(*arguments[:-1], "3", cwd=tmp_path, check=False)
    assert (fewer.returncode, "'shards' has 2 shards, not 3" in fewer.stderr) == (2, True)
    table.write_parquet(tmp_path / "rows" / "b.parquet")
    more = inside(*arguments, cwd=tmp_path, check=False)
    assert (more.returncode, "'shards' has shards of another table" in more.stderr) == (2, True)
    assert "another folder" in more.stderr
    with pytest.raises(CoveyError, match="another table"):  # nothing says where this table is from
        lay_out(table.lazy(), tmp_path / "shards", "client")


def test_a_table_of_a_database_is_laid_out_once(tmp_path, monkeypatch):
    table, spec = counts_of(6), MODELS[4]
    with duckdb.connect(tmp_path / "house.duckdb") as connection:
        connection.from_arrow(table.to_arrow()).create("visits")
        connection.from_arrow(table.with_columns(count=pl.col("count") + 1).to_arrow()).create("others")
    arguments = ("shard", "house.duckdb", "deep/shards", "--client", "client", "--shards", "2", "--table")
    assert "2 shards" in inside(*arguments, "visits", cwd=tmp_path).stderr
    with monkeypatch.context() as patched:
        patched.setattr(warehouse, "exported", None)  # the second time nothing is read
        assert "2 shards" in inside(*arguments, "visits", cwd=tmp_path).stderr
    assert [each.name for each in (tmp_path / "deep").iterdir()] == ["shards"]
    spec = replace(spec, gamma=1.0)
    assert_equal(covey.fit(table, spec), covey.fit(tmp_path / "deep" / "shards", spec))
    for wrong, fact in (("others", "shards of another table"), ("visit", "'visits'")):
        done = inside(*arguments, wrong, cwd=tmp_path, check=False)
        assert (done.returncode, fact in done.stderr) == (2, True), done.stderr


def test_progress_counts_the_shards_that_have_answered(tmp_path):
    folder, said = lay_out(counts_of(1).lazy(), tmp_path / "shards", "client", 4), []
    draft = resolve(replace(MODELS[4], gamma=1.0))
    with open_shards(folder, draft, say=lambda *step, **parts: said.append((step, parts))) as (network, problem):
        fit(network, problem)
    assert said[:2] == [(("looking at the shards",), {}), (("reading the shards",), {})]
    parts = [each for step, each in said if not step]
    assert len(parts) >= 8
    assert [each["done"] for each in parts[:8]] == [1, 2, 3, 4, 1, 2, 3, 4]
    assert {each["of"] for each in parts} == {4}


def test_a_column_with_the_name_of_the_key(tmp_path):
    table = counts_of(4).with_columns(shard=pl.col("x") ** 2, shard_=pl.lit(1.0))
    folder = lay_out(table.lazy(), tmp_path / "shards", "client", 3)
    spec = Spec(formula="y ~ shard", client="client", gamma=2.0)
    assert len(parts_of(folder)) == 3
    assert_equal(covey.fit(table, spec), covey.fit(folder, spec), 1e-10)


def test_rows_that_are_left_out_have_no_categories_classes_or_clusters(tmp_path):
    left_out = {"zone": pl.lit("nowhere"), "yes": pl.lit("maybe"), "cluster": pl.lit(99), "x": pl.lit(None), "w": pl.lit(1.0)}
    table = counts_of(4)
    some = table.head(20).with_columns(**left_out).cast(dict(table.schema))
    nan = some.with_columns(x=pl.lit(float("nan")), client=pl.lit(77).cast(table.schema["client"]))
    table = pl.concat([table, some, nan])
    folder = lay_out(table.lazy(), tmp_path / "shards", "client", 3)
    for formula in ("yes ~ zone + x", "yes ~ zone + scale(x)"):
        family = {"family": "bernoulli", "client": "client", "cluster": "cluster", "gamma": 2.0, "lam": 1.0, "na": "drop"}
        memory, shards = (covey.fit(each, Spec(formula=formula, **family)) for each in (table, folder))
        assert shards.model_.hierarchy.cluster_ids.to_list() == memory.model_.hierarchy.cluster_ids.to_list()
        assert_equal(memory, shards, 1e-10)
    empty = lay_out(some.lazy(), tmp_path / "empty", "client", 3)
    with pytest.raises(CoveyError, match="leaves no row"):
        covey.fit(empty, Spec(formula="yes ~ x", **family))


def test_one_node_or_several_nodes_are_the_same_model():
    table = counts_of(5)
    data, problem = read_rows(table, resolve(MODELS[0]))
    whole = fit(InMemory.of(data, problem.loss), problem)
    halves = [data.clients(0, 5), data.clients(5, data.n_clients)]
    several = fit(Shards.of(halves, problem.loss), problem)
    assert np.allclose(several.theta, whole.theta, rtol=0, atol=1e-10)
    assert several.hierarchy.client_ids.to_list() == whole.hierarchy.client_ids.to_list()
    assert np.allclose(several.learned.units.C, whole.learned.units.C)
