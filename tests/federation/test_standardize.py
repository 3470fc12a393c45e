"""Standardised terms across sites: means and deviations agreed by sums, and sent only if they are asked for."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from covey.errors import CoveyError
from covey.federation.operator.settings import RunSettings
from covey.federation.site.policy import Policy
from covey.federation.site.site import Site
from covey.federation.wire.messages import SiteTotals
from covey.federation.wire.transport import Failure
from covey.model.files import load_model
from covey.nodes.network import Batch, Standardise
from covey.records import decode
from covey.tables.scaling import Scale
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
    table,
)


def raw(seed, family="gaussian"):
    """The number ``x`` in a unit in which no penalty could be right."""
    return table(seed, family).with_columns(x=2e7 + 3e4 * pl.col("x"))


def asks(family="gaussian", **changes):
    return spec(family, standardize=True, tol=1e-11, **changes)


def scales(messages):
    """The scales that the sites got."""
    bodies = [decode(message).body for _, message in messages]
    return [each.scale for body in bodies if isinstance(body, Batch) for each in body.messages if isinstance(each, Standardise)]


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=6)
@given(seed=st.integers(0, 10_000), data=st.data())
def test_any_sharding_gives_the_scale_to_the_bit_and_the_fit(family, secure, seed, data):
    frame = raw(seed, family)
    assume(family != "bernoulli" or 0.1 < frame["y"].mean() < 0.9)
    clients = sorted(frame["client"].unique().to_list())
    at = data.draw(st.lists(st.sampled_from(["s1", "s2", "s3", "s4"]), min_size=len(clients), max_size=len(clients)))
    assume(len(set(at)) > 1)
    sites = sites_of(split_by(frame, dict(zip(clients, at, strict=True))))
    whole = in_memory(frame, asks(family))
    outcome = fit(sites, asks(family), settings=RunSettings(secure=secure))
    assert outcome.model.design == whole.design
    for site in sites.values():
        own = site.node(outcome.run).state(Scale)
        assert (tuple(own.mean.tolist()), tuple(own.sd.tolist())) == (whole.design.mean, whole.design.sd)
    assert_same(outcome, sites, whole)


@pytest.mark.parametrize(
    "changes", [{"formula": "y ~ 0 + x"}, {"weights": "weight"}, {"solver": "newton"}, {"james_stein": True}]
)
def test_settings(changes):
    frame = raw(1)
    sites = sites_of(by_turns(frame, 3))
    assert_same(fit(sites, asks(**changes)), sites, in_memory(frame, asks(**changes)))


@pytest.mark.parametrize("family", ["gaussian", "bernoulli"])
def test_a_sites_model_takes_its_rows_as_they_are(family, tmp_path):
    frame = raw(2, family)
    parts = by_turns(frame, 3)
    whole = in_memory(frame, asks(family))
    sites = {
        name: Site(name, lambda _, part=part: part, models=tmp_path / name, policy=Policy(1)) for name, part in parts.items()
    }
    outcome = fit(sites, asks(family))
    for name, part in parts.items():
        model, _ = load_model(tmp_path / name)
        np.testing.assert_allclose(model.margin(part)[0], whole.margin(part)[0], rtol=0, atol=1e-10)
    for level in ("cluster", "global"):
        here, there = (model.margin(frame, level=level)[0] for model in (outcome.model, whole))
        np.testing.assert_allclose(here, there, rtol=0, atol=1e-10)


@pytest.mark.parametrize("formula", ["y ~ x", "y ~ x + (1 + x || client)"])
def test_learned_penalties_and_intervals_are_those_in_memory(formula, tmp_path):
    frame = raw(9)
    cluster = "cluster" if "|" not in formula else None
    asked = asks(gamma=None, lam=None, formula=formula, cluster=cluster, tests=False)
    parts, whole = by_turns(frame, 3), in_memory(frame, asked)
    sites = {
        name: Site(name, lambda _, part=part: part, models=tmp_path / name, policy=Policy(1)) for name, part in parts.items()
    }
    outcome = fit(sites, asked)
    assert_same(outcome, sites, whole, atol=1e-6)
    for name, part in parts.items():
        model, _ = load_model(tmp_path / name)
        np.testing.assert_allclose(model.intervals(part), whole.intervals(part), rtol=0, atol=1e-5)


@pytest.mark.parametrize("secure", [False, True])
def test_a_site_that_restarts_for_every_message_scales_once(secure, tmp_path):
    frame = raw(3, "bernoulli")
    parts = by_turns(frame, 4)

    class Reopened:
        def __init__(self, name):
            self.name = name

        def answer(self, message):
            return Site(self.name, lambda _: parts[self.name], home=tmp_path / self.name, policy=Policy(1)).answer(message)

    outcome = fit({name: Reopened(name) for name in parts}, asks("bernoulli"), settings=RunSettings(secure=secure))
    kept = fit(sites_of(parts), asks("bernoulli"), settings=RunSettings(secure=secure))
    np.testing.assert_array_equal(outcome.model.w, kept.model.w)
    model, _ = load_model(tmp_path / "s0" / "model")
    whole = in_memory(frame, asks("bernoulli"))
    np.testing.assert_allclose(model.margin(parts["s0"])[0], whole.margin(parts["s0"])[0], rtol=0, atol=1e-10)


def test_a_first_request_that_fails_leaves_the_rows_as_they_were(monkeypatch):
    """The scale travels with the first request; when it is repeated, the site scales its unscaled rows."""
    from covey.solvers.direct.newton_node import NewtonBegin

    frame, failures, begin = raw(4, "bernoulli"), [1], NewtonBegin.at

    def at(self, node):
        if failures:
            failures.pop()
            raise MemoryError
        return begin(self, node)

    monkeypatch.setattr(NewtonBegin, "at", at)
    sites = sites_of(by_turns(frame, 3))
    outcome = fit(sites, asks("bernoulli"))
    assert not failures
    assert_same(outcome, sites, in_memory(frame, asks("bernoulli")))


def test_without_a_site_the_scale_is_that_of_the_others():
    frame = raw(6, "bernoulli").with_columns(x=pl.when(pl.col("client") == "c2").then(9e7).otherwise(pl.col("x")))
    parts = by_turns(frame, 4)
    sites = sites_of(parts)
    gone = Failure("it is not connected")
    away = FaultyTransport(
        sites, lambda site, message, reply: gone if site == "s2" and decode(message).exchange >= 3 else reply
    )
    outcome = fit(sites, asks("bernoulli"), away, on_loss="continue")
    left = in_memory(frame.filter(~frame["client"].is_in(parts["s2"]["client"].to_list())), asks("bernoulli"))
    assert outcome.model.design == left.design
    assert_same(outcome, {name: site for name, site in sites.items() if name != "s2"}, left)


def test_sums_of_the_terms_leave_a_site_only_if_asked_for_and_take_no_exchange():
    sites = sites_of(by_turns(table(7), 3))
    plain, scaled = FaultyTransport(sites), FaultyTransport(sites)
    without, with_scale = fit(sites, spec(), plain), fit(sites, asks(), scaled)
    assert [each.label for each in without.exchanges] == [each.label for each in with_scale.exchanges]
    for transport, there in ((plain, False), (scaled, True)):
        totals = [decode(reply).body[1] for _, reply in transport.replies if isinstance(decode(reply).body, tuple)]
        assert [isinstance(each, SiteTotals) and each.moments is not None for each in totals] == [there] * 3
        assert len(scales(transport.messages)) == 3 * there


def test_a_term_out_of_reach_is_refused_before_the_fit():
    frame = raw(8).with_columns(x=1e44 * pl.col("x"))
    sites = sites_of(by_turns(frame, 3))
    with pytest.raises(CoveyError, match="The values of term 'x' are too large to standardise"):
        fit(sites, asks())
