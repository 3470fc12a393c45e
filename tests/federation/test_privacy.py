"""Differential privacy across sites: its epsilon, the limits of a site, and that nothing is released twice."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from dp_accounting import ComposedDpEvent, GaussianDpEvent, SelfComposedDpEvent, pld, rdp
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from covey.errors import FederationError, SolverError
from covey.federation.operator.operate import operate, report
from covey.federation.operator.settings import RunSettings
from covey.federation.privacy.differential import (
    DELTA,
    NoisySums,
    PlaceClients,
    ReleaseSums,
    noise_for,
    privacy_of,
    seeded_normal,
    spent,
)
from covey.federation.simulate import simulate_sites
from covey.federation.site.budget import Budget
from covey.federation.site.file import SiteFile
from covey.federation.site.policy import Policy
from covey.federation.site.site import Site
from covey.federation.wire.messages import Joined, Privacy, SiteTotals
from covey.federation.wire.transport import Failure, InProcess
from covey.model.files import load_model
from covey.nodes.network import Batch
from covey.records import decode, encode
from covey.solvers.direct.sweep import SweepUp
from tests.federation.sites import (
    FAMILIES,
    FaultyTransport,
    assert_same,
    by_turns,
    fit,
    in_memory,
    kind,
    sites_of,
    spec,
    table,
    thetas,
)

LISTED = {"z": ["z0", "z1", "z2"], "y": [0, 1]}


def private_run(noise=1.0, clip=1.0, rounds=2, **settings):
    return RunSettings(
        **{"retries": 1, "timeout": 1.0, "categories": LISTED, "private": Privacy(noise, clip, rounds), **settings}
    )


def asks(carrier, site):
    """Requests to a site and its replies, as bytes."""
    pairs = zip(carrier.messages, carrier.replies, strict=True)
    return [
        (decode(message), reply) for (name, message), (_, reply) in pairs if name == site and kind(decode(message)) == "ask"
    ]


def released(message):
    body = message.body
    return body.messages[-1] if hasattr(body, "messages") else body


# The accountant


def epsilon(noise, releases, delta=DELTA):
    return spent([(noise, releases)], delta)


def closed_form(sigma, eps):
    """The delta of one Gaussian mechanism (Balle and Wang 2018, theorem 8)."""
    return norm.cdf(0.5 / sigma - eps * sigma) - math.exp(eps) * norm.cdf(-0.5 / sigma - eps * sigma)


@settings(max_examples=50, deadline=None)
@given(st.floats(0.3, 50.0), st.integers(1, 20), st.floats(1e-10, 1e-2))
def test_epsilon_is_that_of_the_closed_form_and_below_the_renyi_bound(noise, releases, delta):
    eps = epsilon(noise, releases, delta)
    if eps > 0:
        assert closed_form(noise / math.sqrt(releases), eps) == pytest.approx(delta, rel=1e-4)
    rho = releases / (2 * noise**2)  # zero-concentrated: its simple bound is above
    assert eps <= rho + 2 * math.sqrt(rho * math.log(1 / delta)) + 1e-9


@pytest.mark.parametrize(("noise", "releases"), [(1.0, 1), (4.0, 3), (8.0, 10)])
def test_two_accountants_agree(noise, releases):
    event = SelfComposedDpEvent(GaussianDpEvent(noise), releases)
    own = epsilon(noise, releases, 1e-6)
    assert pld.PLDAccountant().compose(event).get_epsilon(1e-6) == pytest.approx(own, rel=1e-3)
    assert own < rdp.RdpAccountant().compose(event).get_epsilon(1e-6) < 1.4 * own


def test_releases_with_other_noise_add_up():
    event = ComposedDpEvent([GaussianDpEvent(2.0), GaussianDpEvent(5.0), GaussianDpEvent(5.0)])
    assert spent([(2.0, 1), (5.0, 2)], 1e-6) == pytest.approx(pld.PLDAccountant().compose(event).get_epsilon(1e-6), rel=1e-3)
    assert spent([(2.0, 0)]) == spent([]) == 0.0
    assert spent([(0.0, 1)]) == math.inf


@settings(max_examples=50, deadline=None)
@given(st.floats(0.05, 20.0), st.integers(1, 20), st.floats(1e-10, 1e-2))
def test_noise_for_an_epsilon_has_that_epsilon_and_never_more(target, releases, delta):
    noise = noise_for(target, releases, delta)
    assert target * (1 - 1e-6) <= epsilon(noise, releases, delta) <= target
    assert epsilon(noise * 1.1, releases, delta) < epsilon(noise, releases, delta) < epsilon(noise, releases + 1, delta)


def test_settings_that_make_no_sense_are_refused():
    assert privacy_of({"epsilon": None, "clip": ""}, "gaussian") == (None, 1e-6)
    with pytest.raises(SolverError, match="'clip' belongs to differential privacy; give epsilon too"):
        privacy_of({"clip": 2.0}, "gaussian")
    for wrong in ({"epsilon": 0}, {"epsilon": math.inf}, {"epsilon": "1"}, {"delta": 1.0}, {"rounds": 0}, {"clip": -1}):
        with pytest.raises(SolverError, match=next(iter(wrong))):
            privacy_of({"epsilon": 1.0, **wrong}, "gaussian")


# The run


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("secure", [False, True])
def test_without_noise_a_private_run_is_the_fit_in_memory(family, secure):
    frame, asked = table(1, family), spec(family)
    sites = sites_of(by_turns(frame, 3))
    outcome = fit(sites, asked, settings=private_run(0.0, 20.0, 8, secure=secure))
    assert_same(outcome, sites, in_memory(frame, asked), atol=1e-7)
    assert outcome.privacy["epsilon"] == math.inf


def test_masks_change_nothing_of_the_same_noise():
    frame, runs = table(2, clients=30), []
    for secure in (False, True):
        parts = by_turns(frame, 3)
        sites = {
            name: Site(name, lambda _, p=p: p, Policy(1), draw=seeded_normal(at)) for at, (name, p) in enumerate(parts.items())
        }
        runs.append(fit(sites, spec(), settings=private_run(0.5, secure=secure)).model.w)
    assert np.array_equal(*runs)


@pytest.mark.parametrize("family", FAMILIES)
def test_only_noisy_sums_and_public_counts_leave_a_site(family):
    """All replies are decoded. Other tests check the size of the noise."""
    sites = sites_of(by_turns(table(3, family), 3))
    carrier = FaultyTransport(sites)
    fit(sites, spec(family), carrier, private_run())
    kinds = []
    for (_, message), (site, reply) in zip(carrier.messages, carrier.replies, strict=True):
        asked, body = decode(message), decode(reply).body
        if kind(asked) == "hello":
            assert body.levels == {}
            assert body.classes is None
        elif kind(asked) == "agree":
            joined, first = body
            assert isinstance(joined, Joined)
            assert isinstance(first, SiteTotals)
            assert first.clients.sum() == sites[site].node(asked.run).data.n_clients
            assert first.moments is None
            assert not any(np.any(each) for each in (first.rows, first.response.floats()))
        else:
            kinds.append(type(body))
            assert body is None or isinstance(body, NoisySums)
    assert kinds.count(NoisySums) == 3 * 2


def test_the_promise_is_printed_and_saved_with_both_models(tmp_path):
    asked = {"formula": "y ~ x", "client": "client", "cluster": "cluster", "gamma": 2.0, "lam": 1.5, "epsilon": 2.5}
    sites = sites_of(by_turns(table(4), 3), models=tmp_path / "site")
    text = operate(InProcess(sites), {**asked, "out": str(tmp_path / "out")}, lambda _: None)
    promise = "differential privacy: (epsilon, delta) = (2.5, 1e-06) for every client, clip 1, noise "
    assert promise in text
    assert "0 rows" not in text
    for place, section in ((tmp_path / "out", lambda extra: extra["federation"]), (tmp_path / "site", lambda extra: extra)):
        model, extra = load_model(place)
        assert promise in model.convergence.message
        assert "2 releases" in model.convergence.message
        assert not model.convergence.converged
        assert math.isnan(model.convergence.objective)
        assert section(extra)["privacy"]["epsilon"] == pytest.approx(2.5, rel=1e-6)


def test_noise_is_the_systems_unless_a_simulation_gives_a_seed():
    frame, asked = table(5), spec()
    runs = [
        simulate_sites(frame, asked, 3, settings=private_run(), noise_seed=seed).outcome.model.w
        for seed in (1, 1, 2, None, None)
    ]
    assert np.array_equal(runs[0], runs[1])
    assert not any(np.array_equal(runs[a], runs[b]) for a, b in ((0, 2), (0, 3), (3, 4)))


def test_a_private_run_needs_lists_of_categories_and_classes():
    sites = sites_of(by_turns(table(6, "bernoulli"), 3))
    with pytest.raises(FederationError, match="which values column 'y' has; list all"):
        fit(sites, spec("bernoulli"), settings=private_run(categories=None))
    with pytest.raises(FederationError, match="which values column 'z' has; list all"):
        fit(sites, spec(), settings=private_run(categories={"y": [0, 1]}))
    assert RunSettings.of({"categories": '{"z": ["a"]}'}).categories == {"z": ["a"]}
    with pytest.raises(FederationError, match="'categories'"):
        RunSettings.of({"categories": "z=a,b"})


def test_a_delta_that_is_too_large_is_refused():
    with pytest.raises(SolverError, match=r"delta of 0.1 .* 12 clients .* below 1/12"):
        fit(sites_of(by_turns(table(7), 2)), spec(), settings=private_run(delta=0.1))


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (spec(gamma=None, lam=None), "give gamma and lam"),
        (spec(solver="l2gd"), "leave out solver='l2gd'"),
        (spec(james_stein=True), "does not go with james_stein"),
        (spec(standardize=True), "does not go with standardize"),
        (spec(gamma=None, lam=None, baseline="single-model"), "baseline='single-model' is not supported"),
    ],
)
def test_what_would_send_more_is_refused_before_the_first_message(asked, why):
    sites = sites_of(by_turns(table(8), 2))
    carrier = FaultyTransport(sites)
    with pytest.raises(SolverError, match=why):
        fit(sites, asked, carrier, private_run())
    assert not carrier.messages


# Nothing twice


def test_a_repeated_message_gets_the_same_noise():
    sites = sites_of(by_turns(table(9), 2))
    lost = []

    def drop_first(site, message, reply):
        asked = decode(message)
        if site == "s0" and kind(asked) == "ask" and isinstance(released(asked), ReleaseSums) and not lost:
            lost.append(reply)
            return Failure("no answer in time")
        return reply

    carrier = FaultyTransport(sites, drop_first)
    fit(sites, spec(), carrier, private_run())
    replies = [reply for asked, reply in asks(carrier, "s0") if isinstance(released(asked), ReleaseSums)]
    assert isinstance(replies[0], Failure)
    assert lost == [replies[1]]
    assert [len(one["exchanges"]) for one in sites["s0"].budget.releases.values()] == [2]


def test_a_site_that_lost_its_state_releases_nothing_again(tmp_path):
    """The site loses its state after the first release, but not its count of releases: the run ends."""
    parts = by_turns(table(10), 2)
    homes = {name: tmp_path / name for name in parts}

    def start(name):
        budget = Budget(file=homes[name] / "privacy.json")
        return Site(name, lambda _, part=parts[name]: part, home=homes[name], policy=Policy(1), budget=budget)

    sites = {name: start(name) for name in parts}

    def forget(site, message, reply):
        asked = decode(message)
        if site == "s0" and kind(asked) == "ask" and asked.exchange == 1:
            (homes["s0"] / "runs" / f"{asked.run}.state").unlink()
            carrier.inner = InProcess({**sites, "s0": start("s0")})
        return reply

    carrier = FaultyTransport(sites, forget)
    with pytest.raises(FederationError, match="Site 's0' is lost: it has lost its state of the run"):
        fit(sites, spec(), carrier, private_run())
    kept = json.loads((homes["s0"] / "privacy.json").read_text())
    assert [one["exchanges"] for one in kept["releases"].values()] == [[1]]


def test_an_exchange_with_a_lost_reply_is_not_answered_with_new_noise(tmp_path):
    site = Site("s0", lambda _: table(11), home=tmp_path, policy=Policy(1), budget=Budget(file=tmp_path / "privacy.json"))
    sent = []

    def keep(_, message, reply):
        sent.append(message)
        return reply

    fit({"s0": site}, spec(), FaultyTransport({"s0": site}, keep), private_run())
    run = decode(sent[0]).run
    (tmp_path / "runs" / f"{run}.state").unlink()
    (tmp_path / "questions.json").unlink()
    again = Site("s0", lambda _: table(11), home=tmp_path, policy=Policy(1), budget=Budget(file=tmp_path / "privacy.json"))
    answers = [decode(again.answer(message)) for message in sent if kind(decode(message)) != "deliver"]
    first = next(answer for answer in answers if kind(answer) == "refusal")
    assert "answered message" in first.body.sentence
    assert not any(isinstance(answer.body, NoisySums) for answer in answers)


def test_a_fit_that_began_twice_counts_both_starts():
    frame = table(12, clients=18)
    sites = sites_of(by_turns(frame, 3))

    def die(site, message, reply):
        asked = decode(message)
        gone = site == "s2" and kind(asked) == "ask" and asked.exchange == 2
        return Failure("it is not connected") if gone else reply

    outcome = fit(sites, spec(), FaultyTransport(sites, die), private_run(5.0), on_loss="continue")
    assert outcome.privacy["releases"] == 4
    assert outcome.privacy["epsilon"] == pytest.approx(epsilon(5.0, 4))
    assert "4 releases" in report(outcome)
    made = [(one["noise"], len(one["exchanges"])) for one in sites["s0"].budget.releases.values()]
    assert spent(made) <= outcome.privacy["epsilon"]


# What a site allows


def test_a_site_refuses_to_spend_more_than_it_allows():
    sites = sites_of(by_turns(table(13), 2))
    sites["s1"].budget = Budget(run=1.0)
    cost = epsilon(1.0, 2)
    with pytest.raises(FederationError, match=rf"Site 's1': .*epsilon for one run to {cost:.4g} .*allows 1 at most"):
        fit(sites, spec(), settings=private_run(1.0))
    with pytest.raises(FederationError, match=r"answers only under differential privacy, with epsilon 1 at most"):
        fit(sites, spec())
    assert not sites["s1"].budget.releases
    fit(sites, spec(), settings=private_run(noise_for(1.0, 2)))
    assert sites["s1"].budget.spent() == pytest.approx(1.0, rel=1e-6)


def test_a_site_counts_over_runs_and_restarts(tmp_path):
    parts, asked = by_turns(table(14), 2), private_run(noise_for(1.0, 2))
    file = tmp_path / "privacy.json"

    def once():
        sites = sites_of(parts)
        sites["s0"].budget = Budget(total=1.5, file=file)
        return fit(sites, spec(), settings=asked)

    once()
    once()
    assert Budget(file=file).spent() == pytest.approx(epsilon(noise_for(1.0, 2), 4))
    with pytest.raises(FederationError, match=r"epsilon for all runs to 1\.\d+ .*allows 1.5 at most"):
        once()
    file.write_text("{")
    with pytest.raises(FederationError, match=r"privacy.json is damaged"):
        once()


def test_a_second_start_is_refused_where_it_would_cost_too_much():
    sites = sites_of(by_turns(table(15, clients=18), 3))
    sites["s0"].budget = Budget(run=1.0)

    def die(site, message, reply):
        asked = decode(message)
        return Failure("it") if site == "s2" and kind(asked) == "ask" and asked.exchange == 2 else reply

    with pytest.raises(FederationError, match="Site 's0': This would bring the site's epsilon for one run to"):
        fit(sites, spec(), FaultyTransport(sites, die), private_run(noise_for(1.0, 2)), on_loss="continue")


def test_a_site_without_a_limit_of_epsilon_answers_no_private_run(tmp_path):
    """Otherwise an operator passes the rules about single clients with noise of about zero."""
    table(18).write_parquet(tmp_path / "t.parquet")
    rules = {"client": "client", "columns": ["y", "x", "z"], "groups": ["cluster"], "families": ["gaussian"], "secure": False}
    rules |= {"solvers": ["sweep"], "replies": "all", "minimum": 1, "share": 1.0, "approve": "policy", "operators": ["any"]}

    def site(**more):
        lines = [f"{name} = {json.dumps(value)}" for name, value in {**rules, **more}.items()]
        (tmp_path / "site.toml").write_text("\n".join(lines))
        return SiteFile.read(tmp_path, table=tmp_path / "t.parquet", site="s0", insecure=True).open()

    asked = private_run(noise_for(1e6, 2))
    with pytest.raises(FederationError, match=r"no limit of epsilon.*rule 'epsilon'"):
        fit({"s0": site()}, spec(), settings=asked)
    with pytest.raises(FederationError, match="it allows 5 at most"):
        fit({"s0": site(epsilon=5.0)}, spec(), settings=asked)
    fit({"s0": site(epsilon=5.0)}, spec(), settings=private_run(noise_for(1.0, 2)))
    with pytest.raises(FederationError, match="vectors only"):
        fit({"s0": site(epsilon_total=50.0, replies="vectors")}, spec(), settings=private_run(noise_for(1.0, 2)))


def test_a_site_does_not_join_a_run_whose_privacy_has_changed():
    """The agreement of a run without privacy, to a site that answers only with it."""
    parts = by_turns(table(18), 2)
    carrier = FaultyTransport(sites_of(parts))
    fit(carrier.inner._sites, spec(), carrier)
    agree = next(message for site, message in carrier.messages if site == "s0" and kind(decode(message)) == "agree")
    wary = Site("s0", lambda _: parts["s0"], policy=Policy(1), budget=Budget(total=1.0))
    answer = decode(wary.answer(agree))
    assert kind(answer) == "refusal"
    assert "answers only under differential privacy" in answer.body.sentence


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (SweepUp(), "does not answer 'sweep up'"),
        (ReleaseSums(np.zeros((3, 4)), 0.0, 1.0), "asks for noise 0 and clip 1, but the sites agreed on noise 1 and clip 1"),
        (ReleaseSums(np.zeros((3, 4)), 1.0, 9.0), "asks for noise 1 and clip 9, but the sites agreed on noise 1 and clip 1"),
        (ReleaseSums(np.zeros((3, 4)), 1.0, 1.0), "agreed to 2 releases and has made them"),
    ],
)
def test_a_coordinator_that_asks_for_more_is_refused(body, why):
    """A further message after those of the fit: a site keeps to the agreement."""

    class WithoutEnd(FaultyTransport):
        def exchange(self, messages, timeout):
            end = any(kind(decode(message)) == "deliver" for message in messages.values())
            return dict.fromkeys(messages, Failure("it is not connected")) if end else super().exchange(messages, timeout)

    sites = sites_of(by_turns(table(16), 2))
    carrier = WithoutEnd(sites)
    fit(sites, spec(), carrier, private_run(), on_loss="continue")
    last = next(decode(message) for site, message in reversed(carrier.messages) if site == "s0")
    for asked in (body, Batch((body, PlaceClients(np.zeros((3, 4))))), Batch((PlaceClients(np.zeros((3, 4))), body))):
        message = replace(last, exchange=last.exchange + 1, after=last.exchange, body=asked)
        answer = decode(sites["s0"].answer(encode(message)))
        assert kind(answer) == "refusal"
        assert why in answer.body.sentence
    assert len(thetas(sites, last.run)) == 12


def test_a_nodes_settings_are_its_limits(tmp_path):
    table(17).write_parquet(tmp_path / "t.parquet")
    (tmp_path / "site.toml").write_text("epsilon = 2\nepsilon_total = 5.0\ndelta = 1e-7\n")
    budget = SiteFile.read(tmp_path, table=tmp_path / "t.parquet", site="s", insecure=True).open().budget
    assert (budget.run, budget.total, budget.delta) == (2.0, 5.0, 1e-7)
    assert budget.file == tmp_path / "privacy.json"
