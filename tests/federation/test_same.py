"""Across sites the fit is the one in memory, however clients are dealt out."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from covey.datasets import load_radon
from covey.federation.coordinator import Terms
from covey.federation.simulate import simulate
from covey.model import fit_table
from covey.persist import load_model
from covey.spec import Spec
from tests.federation.sites import FAMILIES, assert_same, by_turns, dealt, fit, in_memory, sites_of, spec, table


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=8)
@given(seed=st.integers(0, 10_000), data=st.data())
def test_any_sharding_gives_the_fit_in_memory(family, secure, seed, data):
    """Clusters split across sites, sites with one client, categories that only one site has."""
    frame = table(seed, family)
    assume(family != "bernoulli" or 0.1 < frame["y"].mean() < 0.9)
    clients = sorted(frame["client"].unique().to_list())
    at = data.draw(st.lists(st.sampled_from(["s1", "s2", "s3", "s4"]), min_size=len(clients), max_size=len(clients)))
    assume(len(set(at)) > 1)
    sites = sites_of(dealt(frame, dict(zip(clients, at, strict=True))))
    asked = spec(family, tol=1e-11)
    outcome = fit(sites, asked, terms=Terms(secure=secure))
    assert_same(outcome, sites, in_memory(frame, asked))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("extra", [{"weights": "weight"}, {"offset": "x"}, {"reduction": "mean"}, {"ridge": 0.3}])
def test_every_setting_that_changes_the_rows(family, extra):
    frame, asked = table(1, family), spec(family, tol=1e-11, **extra)
    sites = sites_of(by_turns(frame, 3))
    assert_same(fit(sites, asked), sites, in_memory(frame, asked))


def test_penalties_by_cluster_and_by_alpha():
    frame = table(2)
    for given_ in ({"gamma": {"a": 1.0, "b": 2.0, "c": 5.0}}, {"lam": None, "alpha": 0.3}, {"lam": float("inf")}, {"lam": 0.0}):
        asked = spec(**given_)
        sites = sites_of(by_turns(frame, 3))
        assert_same(fit(sites, asked), sites, in_memory(frame, asked))


def test_james_stein_and_newton_for_a_linear_model():
    frame = table(3)
    for given_ in ({"james_stein": True}, {"solver": "newton"}, {"solver": "newton", "james_stein": True}):
        asked = spec(tol=1e-11, **given_)
        sites = sites_of(by_turns(frame, 3))
        assert_same(fit(sites, asked), sites, in_memory(frame, asked))


def test_a_category_that_one_site_lacks_has_its_term_everywhere():
    frame = table(4)
    parts = by_turns(frame, 2)
    parts["s0"] = parts["s0"].filter(frame["z"].unique().sort()[0] != parts["s0"]["z"])
    whole = in_memory(__import__("polars").concat(parts.values()), spec())
    sites = sites_of(parts)
    outcome = fit(sites, spec())
    assert outcome.model.terms == whole.terms
    assert_same(outcome, sites, whole)


def test_ids_that_are_whole_numbers_or_dates():
    import polars as pl

    frame = table(5)
    number = frame["client"].str.slice(1).cast(pl.Int64)
    for cluster in (number % 3 + 7, pl.Series([__import__("datetime").date(2020, 1, 1 + int(i) % 3) for i in number])):
        asked = spec()
        changed = frame.with_columns(client=number, cluster=cluster)
        parts = {f"s{at}": changed.filter(number % 2 == at) for at in range(2)}
        sites = sites_of(parts)
        assert_same(fit(sites, asked), sites, in_memory(changed, asked))


def test_radon_across_three_sites_writes_each_sites_models_there(tmp_path):
    """The site's folder answers for its own counties as the model in memory does, and for others by their state."""
    homes = load_radon()
    asked = Spec(formula="log_radon ~ floor", client="county", cluster="state", gamma=10.0)
    run = simulate(homes, asked, sites=3, models=tmp_path)
    whole = fit_table(homes, asked)
    for name in run.outcome.roster:
        model, _ = load_model(tmp_path / name)
        own = set(model.hierarchy.client_ids.to_list())
        rows = homes.filter(homes["county"].is_in(list(own)))
        here, _ = model.margin(rows)
        there, _ = whole.margin(rows)
        np.testing.assert_allclose(here, there, atol=1e-10)
        others = homes.filter(~homes["county"].is_in(list(own)))
        assert set(model.margin(others)[1].level()) == {"cluster"}
    mine = [set(load_model(tmp_path / name)[0].hierarchy.client_ids.to_list()) for name in run.outcome.roster]
    assert sum(map(len, mine)) == whole.hierarchy.n_clients
    assert not set.intersection(*mine)
