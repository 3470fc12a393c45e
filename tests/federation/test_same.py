"""A fit across sites equals the fit in memory, for any assignment of clients to sites."""

from dataclasses import replace
from functools import cache

import numpy as np
import polars as pl
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from covey.datasets import load_radon
from covey.errors import CoveyError, FederationError
from covey.federation.operator.coordinator import Federation
from covey.federation.operator.exchanges import Exchanges
from covey.federation.operator.journal import Journal
from covey.federation.operator.settings import RunSettings
from covey.federation.simulate import simulate_sites
from covey.model.files import load_model, save_model
from covey.model.robust import sandwich
from covey.model.summary import describe
from covey.nodes.network import SetGamma
from covey.problem.problem import Spec, resolve
from covey.solvers.direct.sweep import SweepUp
from tests.federation.sites import (
    FAMILIES,
    FaultyTransport,
    assert_same,
    by_turns,
    fit,
    in_memory,
    sites_of,
    spec,
    split_by,
    spread,
    table,
    thetas,
)
from tests.fits import fit_table


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=5)
@given(seed=st.integers(0, 10_000), data=st.data())
def test_any_sharding_gives_the_fit_in_memory(family, secure, seed, data):
    """Clusters split across sites, sites with one client, categories that only one site has."""
    frame = table(seed, family)
    assume(family != "bernoulli" or 0.1 < frame["y"].mean() < 0.9)
    clients = sorted(frame["client"].unique().to_list())
    at = data.draw(st.lists(st.sampled_from(["s1", "s2", "s3", "s4"]), min_size=len(clients), max_size=len(clients)))
    assume(len(set(at)) > 1)
    parts = split_by(frame, dict(zip(clients, at, strict=True)))
    assume(not secure or spread(parts))
    sites = sites_of(parts)
    asked = spec(family, tol=1e-11)
    outcome = fit(sites, asked, settings=RunSettings(secure=secure))
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


LEARNED = {
    "reml": {},
    "ml": {"penalty": "ml"},
    "full covariance": {"formula": "y ~ x", "covariance": "full"},
    "per cluster": {"per_cluster": True, "vary": ["Intercept"]},
    "logistic": {"family": "bernoulli", "formula": "y ~ x", "vary": ["Intercept"]},
    "counts": {"family": "poisson", "formula": "y ~ x", "vary": ["Intercept"]},
}


@cache
def learned_in_memory(what):
    """One fit for both runs, with and without masks."""
    asked = spec(**{"gamma": None, "lam": None, **LEARNED[what]})
    frame = table(7, asked.family, clients=30, clusters=5)
    return asked, frame, in_memory(frame, asked)


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("what", LEARNED)
def test_penalties_learned_across_sites_are_those_learned_in_memory(what, secure, tmp_path):
    """Components, tests, models, and the intervals at a site for its own clients equal those in memory."""
    asked, frame, model = learned_in_memory(what)
    sites = sites_of(by_turns(frame, 3), models=None)
    for name, site in sites.items():
        site.models = tmp_path / name
    outcome = fit(sites, asked, settings=RunSettings(secure=secure))
    assert_same(outcome, sites, model, atol=1e-7)
    here, there = outcome.model.learned.components, model.learned.components
    assert here.log_likelihood == pytest.approx(there.log_likelihood, rel=1e-9)
    np.testing.assert_allclose(here.client.sd, there.client.sd, atol=1e-6)
    np.testing.assert_allclose(here.cluster.sd, there.cluster.sd, atol=1e-6)
    assert [test.level for test in here.tests] == [test.level for test in there.tests]
    whole = model.coefficients("client").select("client", "term", "estimate", "std_error").sort("client", "term")
    parts = [load_model(tmp_path / name)[0].coefficients("client") for name in sites]
    own = pl.concat([part.select("client", "term", "estimate", "std_error") for part in parts]).sort("client", "term")
    np.testing.assert_allclose(own["estimate"], whole["estimate"], atol=1e-7)
    np.testing.assert_allclose(own["std_error"], whole["std_error"], atol=1e-5)
    for name in sites:
        assert f"parameters, learned from {len(frame)} rows" in str(describe(load_model(tmp_path / name)[0]))
    assert "learned from" not in describe(outcome.model) + describe(model)
    if asked.family == "gaussian":
        check_sandwich(outcome.model, model, [load_model(tmp_path / name)[0] for name in sites], tmp_path)


def check_sandwich(operator, model, at_sites, folder):
    """The operator has the scores of clusters, also after saving, and the sites do not."""
    again = load_model(save_model(operator, folder / "operator"))[0]
    for one in (operator, again):
        here, there = (sandwich(each.posterior, each.wbar, "CR3") for each in (one, model))
        np.testing.assert_allclose(here.covariance, there.covariance, atol=1e-6)
        np.testing.assert_allclose(here.freedom, there.freedom, rtol=1e-5)
        with pytest.raises(CoveyError, match="CR2"):
            sandwich(one.posterior, one.wbar, "CR2")
    assert {site.learned.whole.scores for site in at_sites} == {None}


RANDOMISED = {
    "l2gd": ("gaussian", {}),
    "l2gd, switching": ("poisson", {"options": {"steps": "switching"}, "weights": "weight"}),
    "one_coin": ("bernoulli", {}),
    "al2sgd_plus": ("bernoulli", {}),
    "al2sgd_plus, majority": ("gaussian", {"options": {"vote": "majority"}}),
}


# The same over the test network, with many more shardings, is in tests/solvers/test_across.py.
LONG = [pytest.param(what, secure, marks=pytest.mark.federation) for what in list(RANDOMISED)[1:] for secure in (False, True)]


@pytest.mark.filterwarnings("ignore::covey.errors.ConvergenceWarning")  # a few dozen iterations tell bits apart
@pytest.mark.parametrize(("what", "secure"), [("l2gd", False), ("l2gd", True), *LONG])
@settings(max_examples=1)
@given(seed=st.integers(0, 10_000), data=st.data())
def test_randomised_algorithms_have_the_bits_of_the_run_in_memory(what, secure, seed, data):
    family, more = RANDOMISED[what]
    frame = table(12, family)
    asked = spec(family, formula="y ~ x", solver=what.split(",")[0], max_iter=60, seed=seed, **more)
    clients = sorted(frame["client"].unique().to_list())
    at = data.draw(st.lists(st.sampled_from(["s1", "s2", "s3"]), min_size=len(clients), max_size=len(clients)))
    assume(len(set(at)) > 1)
    parts = split_by(frame, dict(zip(clients, at, strict=True)))
    assume(not secure or spread(parts))
    sites = sites_of(parts)
    outcome, model = fit(sites, asked, settings=RunSettings(secure=secure)), in_memory(frame, asked)
    np.testing.assert_array_equal(outcome.model.w, model.w)
    np.testing.assert_array_equal(outcome.model.wbar, model.wbar)
    found = thetas(sites, outcome.run)
    for client, theta in zip(model.hierarchy.client_ids.to_list(), model.theta, strict=True):
        np.testing.assert_array_equal(found[client], theta)
    assert outcome.model.history.equals(model.history)


def test_the_size_of_messages_depends_on_clusters_and_terms_alone():
    sent = []
    for clients in (15, 60):
        sites = sites_of(by_turns(table(9, clients=clients), 3))
        exchanges = fit(sites, spec()).exchanges
        sent.append([(each.label, each.down, each.up) for each in exchanges if each.phase == "fit"])
    for (few, *small), (many, *large) in zip(*sent, strict=True):
        assert few == many
        np.testing.assert_allclose(small, large, atol=60)  # single numbers are written in as many digits as they have


def test_client_ids_that_are_unique_within_a_cluster_only():
    """Every district has schools 1, 2, 3 and is at its own site; by the formula these are different schools."""
    frame = table(8, clients=12, clusters=3).with_columns(client=pl.col("client").str.slice(1).cast(pl.Int64) // 3)
    asked = replace(spec(), formula="y ~ x + (1 + x | cluster/client)", client=None, cluster=None, gamma=None, lam=None)
    sites = sites_of({name: part for (name,), part in frame.group_by(["cluster"])})
    outcome, model = fit(sites, asked), in_memory(frame, asked)
    assert model.hierarchy.client_ids.to_list() == [0, 1, 2, 3] * 3
    assert_same(outcome, sites, model, atol=1e-7)


def test_a_category_that_one_site_lacks_has_its_term_everywhere():
    frame = table(4)
    parts = by_turns(frame, 2)
    parts["s0"] = parts["s0"].filter(frame["z"].unique().sort()[0] != parts["s0"]["z"])
    whole = in_memory(pl.concat(parts.values()), spec())
    sites = sites_of(parts)
    outcome = fit(sites, spec())
    assert outcome.model.terms == whole.terms
    assert_same(outcome, sites, whole)


def test_ids_that_are_whole_numbers_or_dates():
    frame = table(5)
    number = frame["client"].str.slice(1).cast(pl.Int64)
    for cluster in (number % 3 + 7, pl.Series([__import__("datetime").date(2020, 1, 1 + int(i) % 3) for i in number])):
        asked = spec()
        changed = frame.with_columns(client=number, cluster=cluster)
        parts = {f"s{at}": changed.filter(number % 2 == at) for at in range(2)}
        sites = sites_of(parts)
        assert_same(fit(sites, asked), sites, in_memory(changed, asked))


def test_the_operators_model_answers_for_rows_by_their_cluster():
    frame = table(6)
    sites = sites_of(by_turns(frame, 3))
    outcome, whole = fit(sites, spec()), in_memory(frame, spec())
    here, chosen = outcome.model.margin(frame)
    assert set(chosen.level()) == {"cluster"}
    np.testing.assert_allclose(here, whole.margin(frame, level="cluster")[0], atol=1e-10)


def test_radon_across_three_sites_writes_each_sites_models_there(tmp_path):
    """A site's model predicts its own counties like the model in memory, and others by their state."""
    homes = load_radon()
    asked = Spec(formula="log_radon ~ floor", client="county", cluster="state", gamma=10.0)
    run = simulate_sites(homes, asked, sites=3, models=tmp_path)
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


def test_sites_are_a_network_like_any_other():
    """Messages are sent one by one and collected in order; one without a reply is carried out too."""
    frame, asked = table(3), spec()
    sites = sites_of(by_turns(frame, 3))
    carrier = FaultyTransport(sites)
    about = {"run": "aa", "salt": "00" * 16}
    exchanges = Exchanges(carrier, tuple(sorted(sites)), Journal(None, {}, about), RunSettings())
    federation = Federation(exchanges, resolve(asked))
    federation.open()
    before = len(carrier.messages)
    gamma = SetGamma(np.full(3, 2.0))
    for message in (gamma, SweepUp(), SweepUp()):
        federation.send(message)
    assert len(carrier.messages) == before + 2 * len(sites)  # the second one went out when the first was answered
    (nothing, one), (two,), none = federation.collect(), federation.collect(), federation.collect()
    assert none == []
    assert (nothing.message, nothing.reply) == (gamma, None)
    assert (one.reply.C == two.reply.C).all()
    assert len(carrier.messages) == before + 2 * len(sites)
    assert [each.phase for each in federation.exchanges.made] == ["set-up", "set-up", "fit", "fit"]
    with federation.during("measure"):
        assert (federation.ask(SweepUp()).C == one.reply.C).all()
    assert federation.exchanges.made[-1].phase == "measure"
    assert all((site.node("aa").gamma == 2.0).all() for site in sites.values())
    federation.send(SetGamma(np.full(3, 2.0)))  # the same ones again
    assert (federation.ask(SweepUp()).C == one.reply.C).all()
    federation.send(SetGamma(np.full(3, 2.5)))  # sums at many penalties would say much about few clients
    with pytest.raises(FederationError, match="penalties of a run cannot change"):
        federation.ask(SweepUp())
