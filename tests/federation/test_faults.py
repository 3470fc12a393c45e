"""Faults of transports, sites and the coordinator: a run recovers or stops, and never gives a wrong answer."""

from dataclasses import replace
from functools import cache

import numpy as np
import polars as pl
import pytest

from covey.errors import CoveyError, FederationError
from covey.federation.operator.settings import RunSettings
from covey.federation.site.policy import Policy
from covey.federation.site.site import Site
from covey.federation.wire.codec import Envelope, Refusal
from covey.federation.wire.transport import Failure
from covey.kernels import TOO_LARGE
from covey.records import decode, encode
from covey.solvers.first_order.l2gd import L2gdMove
from tests.federation.sites import FaultyTransport, assert_same, by_turns, fit, in_memory, kind, sites_of, spec, split_by, table

FRAME = table(11, "bernoulli")
ASKED = spec("bernoulli", tol=1e-11)
GONE = Failure("it is not connected")


@cache
def whole(secure=False):
    """The run without faults; all tests share it, and only read it."""
    sites = sites_of(by_turns(FRAME, 4))
    return fit(sites, ASKED, settings=RunSettings(secure=secure))


def asked(message: bytes) -> Envelope:
    return decode(message)


def when(site, exchange, act, times=1):
    """A fault in the reply of one site to one exchange of the fit, a number of times."""
    left = [times]

    def fault(name, message, reply):
        read = asked(message)
        if name == site and kind(read) == "ask" and read.exchange == exchange and left[0] > 0:
            left[0] -= 1
            return act(message, reply)
        return reply

    return fault


def assert_bits(one, two):
    np.testing.assert_array_equal(one.model.w, two.model.w)
    np.testing.assert_array_equal(one.model.wbar, two.model.wbar)


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize(
    "act",
    [
        lambda message, reply: GONE,
        lambda message, reply: Failure("no answer in 1 s"),
        lambda message, reply: reply[: len(reply) // 2],
        lambda message, reply: b"",
        lambda message, reply: encode("hello there"),
        lambda message, reply: encode(replace(decode(reply), exchange=decode(reply).exchange - 1)),
        lambda message, reply: encode(replace(decode(reply), run="another")),
        lambda message, reply: encode(Envelope("", -1, -1, Refusal("broken", "KeyError"))),
    ],
    ids=["gone", "late", "cut", "empty", "nonsense", "stale", "other run", "broken"],
)
def test_an_unusable_reply_is_asked_for_again(act, secure):
    sites = sites_of(by_turns(FRAME, 4))
    outcome = fit(sites, ASKED, FaultyTransport(sites, when("s1", 2, act)), RunSettings(retries=1, secure=secure))
    assert_bits(outcome, whole(secure))
    assert not outcome.without


def test_a_lost_site_stops_the_run_which_continues_when_it_is_back(tmp_path):
    sites, journal = sites_of(by_turns(FRAME, 4)), tmp_path / "run.journal"
    away = FaultyTransport(sites, when("s2", 3, lambda *_: GONE, times=99))
    with pytest.raises(FederationError, match=r"Site 's2' is lost: it is not connected; the run has stopped"):
        fit(sites, ASKED, away, journal=journal)
    back = FaultyTransport(sites)
    outcome = fit(sites, ASKED, back, journal=journal)
    assert_bits(outcome, whole())
    assert min(asked(message).exchange for _, message in back.messages) == 3
    assert not journal.exists()


def test_a_run_continues_without_a_lost_site_and_reports_it():
    parts = by_turns(FRAME, 4)
    sites = sites_of(parts)
    away = FaultyTransport(sites, lambda site, message, reply: GONE if site == "s2" and asked(message).exchange >= 3 else reply)
    outcome = fit(sites, ASKED, away, on_loss="continue")
    assert outcome.roster == ("s0", "s1", "s3")
    assert outcome.without == {"s2": "it is not connected"}
    left = FRAME.filter(~FRAME["client"].is_in(parts["s2"]["client"].to_list()))
    assert_same(outcome, {name: site for name, site in sites.items() if name != "s2"}, in_memory(left, ASKED))
    assert int(outcome.model.clients_of_cluster.sum()) == left["client"].n_unique()


def test_a_site_joins_a_limited_number_of_starts_of_a_run(monkeypatch):
    """A changed coordinator cannot start a run again and again to ask for sums at other penalties."""
    monkeypatch.setattr("covey.federation.site.site.MOST_STARTS", 1)
    sites = sites_of(by_turns(FRAME, 4))
    away = FaultyTransport(sites, lambda site, message, reply: GONE if site == "s2" and asked(message).exchange >= 3 else reply)
    with pytest.raises(FederationError, match="started 1 times"):
        fit(sites, ASKED, away, on_loss="continue")


def test_a_run_without_a_lost_site_is_resumed(tmp_path):
    sites, journal = sites_of(by_turns(FRAME, 4)), tmp_path / "run.journal"

    def gone(site, message, reply):
        return GONE if site == "s2" and asked(message).exchange >= 3 else reply

    expected = fit(sites_of(by_turns(FRAME, 4)), ASKED, FaultyTransport(sites, gone), on_loss="continue")
    sites = sites_of(by_turns(FRAME, 4))
    with pytest.raises(Killed):
        fit(sites, ASKED, Killing(sites, 9, gone), on_loss="continue", journal=journal)
    outcome = fit(sites, ASKED, FaultyTransport(sites, gone), on_loss="continue", journal=journal)
    assert_bits(outcome, expected)
    assert outcome.without == expected.without


class Killed(BaseException):
    """The coordinator's process ends here."""


class Killing(FaultyTransport):
    """The coordinator is killed after a number of exchanges, before or after it has sent the next messages."""

    def __init__(self, sites, after, fault=None, *, sent=True):
        super().__init__(sites, fault)
        self.left, self.sent = after, sent

    def exchange(self, messages, timeout):
        if self.left == 0 and not self.sent:
            raise Killed
        came = super().exchange(messages, timeout)
        self.left -= 1
        if self.left < 0:
            raise Killed
        return came


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("after", range(0, 10, 3))
def test_a_killed_coordinator_resumes_to_the_same_bits(after, secure, tmp_path):
    journal, terms = tmp_path / "run.journal", RunSettings(secure=secure)
    sites = sites_of(by_turns(FRAME, 4))
    with pytest.raises(Killed):
        fit(sites, ASKED, Killing(sites, after), terms, journal=journal)
    second = FaultyTransport(sites)
    outcome = fit(sites, ASKED, second, terms, journal=journal)
    assert_bits(outcome, whole(secure))
    assert len(outcome.exchanges) == len(whole(secure).exchanges)
    kinds = [kind(asked(message)) for _, message in second.messages]
    assert kinds.count("hello") == (4 if after == 0 else 0)


@pytest.mark.parametrize("cut", [1, 7, 60, 400])
def test_a_truncated_journal_loses_at_most_one_exchange(cut, tmp_path):
    """As if the coordinator were killed while it writes."""
    journal, sites = tmp_path / "run.journal", sites_of(by_turns(FRAME, 4))
    with pytest.raises(Killed):
        fit(sites, ASKED, Killing(sites, 5, sent=False), journal=journal)
    journal.write_bytes(journal.read_bytes()[:-cut])
    assert_bits(fit(sites, ASKED, journal=journal), whole())


def test_a_journal_with_a_wrong_checksum_is_refused(tmp_path):
    """One bit of a sum on disk would be a wrong model."""
    journal, sites = tmp_path / "run.journal", sites_of(by_turns(FRAME, 4))
    with pytest.raises(Killed):
        fit(sites, ASKED, Killing(sites, 5, sent=False), journal=journal)
    text = bytearray(journal.read_bytes())
    text[len(text) // 2] ^= 64
    journal.write_bytes(text)
    with pytest.raises(FederationError, match="cannot be read; delete it"):
        fit(sites, ASKED, journal=journal)


def test_a_journal_of_another_run_is_refused(tmp_path):
    journal, sites = tmp_path / "run.journal", sites_of(by_turns(FRAME, 4))
    with pytest.raises(Killed):
        fit(sites, ASKED, Killing(sites, 5), journal=journal)
    with pytest.raises(FederationError, match=r"of another run .different spec.; delete it"):
        fit(sites, replace(ASKED, gamma=3.0), journal=journal)
    assert journal.exists()
    journal.write_bytes(b"something else")
    with pytest.raises(FederationError, match="cannot be read; delete it"):
        fit(sites, ASKED, journal=journal)


@pytest.mark.parametrize("secure", [False, True])
def test_a_site_that_lost_its_state_is_lost_and_named(secure):
    """It has also lost its record of what it has sent, so it does not go on as if nothing had happened."""
    parts = by_turns(FRAME, 4)
    forgot: list[None] = []

    def forget(site, message, reply):
        if site == "s1" and kind(asked(message)) == "ask" and asked(message).exchange == 3 and not forgot:
            forgot.append(carrier.inner._sites.update(sites_of({"s1": parts["s1"]})))
            return GONE
        return reply

    sites = sites_of(parts)
    carrier = FaultyTransport(sites, forget)
    with pytest.raises(FederationError, match=r"Site 's1' is lost: it has lost its state of the run; put its home folder back"):
        fit(sites, ASKED, carrier, RunSettings(retries=2, secure=secure))
    if secure:
        return
    forgot.clear()
    sites = sites_of(parts)
    carrier = FaultyTransport(sites, forget)
    outcome = fit(sites, ASKED, carrier, RunSettings(retries=2), on_loss="continue")
    assert list(outcome.without) == ["s1"]
    left = FRAME.filter(~FRAME["client"].is_in(parts["s1"]["client"].to_list()))
    assert_same(outcome, {name: site for name, site in sites.items() if name != "s1"}, in_memory(left, ASKED))


@pytest.mark.parametrize("secure", [False, True])
def test_a_site_restarts_for_every_message_from_its_saved_state(secure, tmp_path):
    """As with Flower, which starts a process for each message."""
    parts = by_turns(FRAME, 4)

    class Reopened:
        def __init__(self, name):
            self.name = name

        def answer(self, message):
            return Site(self.name, lambda _: parts[self.name], home=tmp_path / self.name, policy=Policy(1)).answer(message)

    sites = {name: Reopened(name) for name in parts}
    assert_bits(fit(sites, ASKED, settings=RunSettings(secure=secure)), whole(secure))
    assert (tmp_path / "s0" / "model" / "model.json").exists()
    state = next((tmp_path / "s0" / "runs").iterdir())
    assert state.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda body: replace(body, value=float("nan")), "sent a number that is not finite"),
        (lambda body: replace(body, force=np.full_like(body.force, np.nan)), "sent a number that is not finite"),
        (lambda body: replace(body, force=np.full_like(body.force, np.inf)), "sent a number that is not finite"),
        (lambda body: replace(body, seen=replace(body.seen, C=np.inf * body.seen.C)), "sent a number that is not finite"),
        (lambda body: replace(body, force=body.force[:2]), "shape 2 x 4 in place of 3 x 4"),
        (lambda body: replace(body, force=body.force.astype(np.int64)), "int64 in place of float64"),
        (lambda body: (body,), "a tuple in place of a NewtonReport"),
    ],
)
def test_replies_that_cannot_be_added_make_their_site_lost(spoil, why):
    def act(_, reply):
        read = decode(reply)
        return encode(replace(read, body=spoil(read.body)))

    sites = sites_of(by_turns(FRAME, 4))
    with pytest.raises(FederationError, match=f"Site 's1' is lost.*{why}"):
        fit(sites, ASKED, FaultyTransport(sites, when("s1", 2, act, times=99)))
    parts = by_turns(FRAME, 4)
    sites = sites_of(parts)
    outcome = fit(sites, ASKED, FaultyTransport(sites, when("s1", 2, act, times=1)), on_loss="continue")
    assert list(outcome.without) == ["s1"]


def test_messages_out_of_order_are_refused_and_change_nothing():
    sites = sites_of(by_turns(FRAME, 4))
    carrier = FaultyTransport(sites)
    outcome = fit(sites, ASKED, carrier)
    before = sites["s0"].node(outcome.run).coefficients().copy()
    old = [message for site, message in carrier.messages if site == "s0" and kind(asked(message)) == "ask"]
    for message in old:
        assert decode(sites["s0"].answer(message)).body.reason == "stale"
    last = next(message for site, message in reversed(carrier.messages) if site == "s0")
    assert sites["s0"].answer(last) == next(reply for site, reply in reversed(carrier.replies) if site == "s0")
    forged = encode(replace(asked(last), body=replace(asked(last).body, wbar=asked(last).body.wbar + 1)))
    assert decode(sites["s0"].answer(forged)).body.reason == "stale"
    ahead = encode(replace(asked(last), exchange=99))
    assert decode(sites["s0"].answer(ahead)).body.reason == "behind"
    np.testing.assert_array_equal(sites["s0"].node(outcome.run).coefficients(), before)


@pytest.mark.parametrize(
    "change", [{"x": pl.col("x") + 1}, {"client": "new " + pl.col("client")}, {"cluster": pl.col("cluster").replace("a", "b")}]
)
def test_a_table_that_changes_during_a_run_is_refused(change, tmp_path):
    parts = by_turns(FRAME, 4)

    class Reopened:
        def __init__(self, name):
            self.name = name

        def answer(self, message):
            part = parts[self.name]
            if asked(message).exchange >= 3 and self.name == "s3":
                part = part.with_columns(**change)
            return Site(self.name, lambda _: part, home=tmp_path / self.name, policy=Policy(1)).answer(message)

    with pytest.raises(FederationError, match="Site 's3': The table has changed since the run began"):
        fit({name: Reopened(name) for name in parts}, ASKED)


def test_under_masks_a_run_does_not_continue_without_a_single_site():
    """The difference of the totals would show its sums; two sites that are lost together hide each other."""
    clients = FRAME["client"].unique(maintain_order=True).to_list()
    parts = split_by(FRAME, {client: f"s{at % 4}" for at, client in enumerate(clients)})  # every cluster is at every site
    sites = sites_of(parts)
    terms = RunSettings(secure=True, retries=0)

    def gone(*lost):
        return lambda site, message, reply: GONE if site in lost and asked(message).exchange >= 2 else reply

    with pytest.raises(FederationError, match="only site 's2' drops out"):
        fit(sites, ASKED, FaultyTransport(sites, gone("s2")), terms, on_loss="continue")
    sites = sites_of(parts)
    outcome = fit(sites, ASKED, FaultyTransport(sites, gone("s2", "s3")), terms, on_loss="continue")
    assert outcome.roster == ("s0", "s1")
    lost = parts["s2"]["client"].to_list() + parts["s3"]["client"].to_list()
    left = {name: site for name, site in sites.items() if name in outcome.roster}
    assert_same(outcome, left, in_memory(FRAME.filter(~FRAME["client"].is_in(lost)), ASKED))


def test_under_masks_two_lost_sites_must_share_their_clusters():
    sites = sites_of(by_turns(FRAME, 5))

    def gone(site, message, reply):
        return GONE if site in ("s2", "s4") and asked(message).exchange >= 2 else reply  # of these s4 alone has cluster a

    with pytest.raises(FederationError, match="only site 's4' drops out"):
        fit(sites, ASKED, FaultyTransport(sites, gone), RunSettings(secure=True, retries=0), on_loss="continue")


def test_under_masks_two_lost_sites_must_share_their_categories():
    clients = FRAME["client"].unique(maintain_order=True).to_list()
    rare = pl.when(pl.col("client").is_in([clients[0], clients[2]])).then(pl.lit("rare")).otherwise(pl.col("z"))
    parts = split_by(FRAME.with_columns(z=rare), {client: f"s{at % 4}" for at, client in enumerate(clients)})
    sites = sites_of(parts)

    def gone(site, message, reply):
        return GONE if site in ("s2", "s3") and asked(message).exchange >= 2 else reply  # rare is at s0 and s2

    with pytest.raises(FederationError, match=r"takes two different sites or more. Got 's0'|Without 's2' the totals"):
        fit(sites, ASKED, FaultyTransport(sites, gone), RunSettings(secure=True, retries=0), on_loss="continue")


@pytest.mark.parametrize("family", ["gaussian", "bernoulli"])
def test_under_masks_a_site_with_numbers_that_are_not_finite_is_named(family):
    frame, given = table(11, family), spec(family)

    def act(_, reply):
        read = decode(reply)
        skeleton, numbers = read.body
        size = numbers.size.copy()
        size[0] = TOO_LARGE  # as NaN comes out of masks
        return encode(replace(read, body=(skeleton, replace(numbers, size=size))))

    sites = sites_of(by_turns(frame, 4))
    with pytest.raises(FederationError, match="Site 's1' is lost: it sent a number that is not finite"):
        fit(sites, given, FaultyTransport(sites, when("s1", 1, act, times=99)), RunSettings(secure=True))

    def other(_, reply):
        return encode(replace(decode(reply), body=3))

    sites = sites_of(by_turns(frame, 4))
    with pytest.raises(FederationError, match="Site 's1' is lost: it sent a masked reply that cannot be read"):
        fit(sites, given, FaultyTransport(sites, when("s1", 1, other, times=99)), RunSettings(secure=True))


def test_of_two_sites_with_different_replies_the_wrong_one_is_lost():
    def act(_, reply):
        read = decode(reply)
        return encode(replace(read, body=replace(read.body, force=read.body.force[:2])))

    sites = sites_of(by_turns(FRAME, 2))
    with pytest.raises(FederationError, match=r"Site 's0' is lost: it sent numbers of shape 2 x 4"):
        fit(sites, ASKED, FaultyTransport(sites, when("s0", 2, act, times=99)))


def test_a_step_that_overflows_does_not_lose_a_site():
    """With a heavy-tailed covariate Newton's first steps overflow at one site; they are halved, as in memory."""
    rng = np.random.default_rng(8)
    client = np.repeat(np.arange(12), 5)
    x, exposure = 10 * np.exp(4 * rng.normal(size=60)), 8 * rng.normal(size=60)
    y = rng.poisson(np.exp(np.clip(0.3 + 0.5 * rng.normal(size=12)[client], -3, 3)))
    frame = pl.DataFrame({"client": client, "cluster": client % 2, "x": x, "exposure": exposure, "y": y})
    given = spec("poisson", formula="y ~ x", offset="exposure", gamma=0.01, lam=1.0)
    sites = sites_of({f"s{at}": frame.filter(pl.col("client") % 2 == at) for at in range(2)})
    carrier = FaultyTransport(sites)
    outcome = fit(sites, given, carrier, on_loss="continue")
    assert not outcome.without
    values = [getattr(decode(reply).body, "value", 0.0) for _, reply in carrier.replies]
    assert np.isinf(values).any(), "no step was so long"
    np.testing.assert_allclose(outcome.model.w, in_memory(frame, given).w, atol=1e-7)


def test_a_site_that_is_lost_at_the_end(tmp_path):
    """The operator's model is already written; the run can be resumed, or ends and names the site."""
    journal, out = tmp_path / "journal", tmp_path / "model"

    def gone(site, message, reply):
        return GONE if site == "s1" and kind(asked(message)) == "deliver" else reply

    sites = sites_of(by_turns(FRAME, 4))
    with pytest.raises(FederationError, match=r"Site 's1' is lost.* messages are kept"):
        fit(sites, ASKED, FaultyTransport(sites, gone), journal=journal, out=out)
    assert (out / "model.json").exists()
    again = FaultyTransport(sites)
    outcome = fit(sites, ASKED, again, journal=journal, out=out)
    assert {kind(asked(message)) for _, message in again.messages} == {"deliver"}
    assert not outcome.missed
    sites = sites_of(by_turns(FRAME, 4))
    outcome = fit(sites, ASKED, FaultyTransport(sites, gone), journal=journal, on_loss="continue")
    assert (outcome.roster, dict(outcome.without), list(outcome.missed)) == (("s0", "s1", "s2", "s3"), {}, ["s1"])
    assert_bits(outcome, whole())
    assert not journal.exists()


def test_a_journal_of_another_run_is_not_deleted(tmp_path):
    """The run was killed in the set-up; the same command with other categories is another run."""
    journal, sites = tmp_path / "run.journal", sites_of(by_turns(FRAME, 4))
    with pytest.raises(Killed):
        fit(sites, ASKED, Killing(sites, 2, sent=False), journal=journal)
    before = journal.read_bytes()
    other = RunSettings(categories={"z": ["z2", "z1", "z0"]})
    with pytest.raises(FederationError, match="is of another run"):
        fit(sites, ASKED, settings=other, journal=journal)
    assert journal.read_bytes() == before


def test_a_refused_run_leaves_no_journal(tmp_path):
    """After an error that would occur again nothing is kept: the same command starts a new run with a corrected table."""
    journal, parts = tmp_path / "journal", by_turns(FRAME, 4)
    twice = {**parts, "s2": pl.concat([parts["s2"], parts["s0"].filter(pl.col("client") == "c0")])}
    with pytest.raises(FederationError, match="A client with the same id"):
        fit(sites_of(twice), ASKED, journal=journal)
    assert not journal.exists()
    with pytest.raises(CoveyError, match="There is no column"):
        fit(sites_of(parts), replace(ASKED, formula="y ~ xx"), journal=journal)
    sites = sites_of(parts)
    with pytest.raises(FederationError, match=r"Site 's1' is lost.*the run has stopped\.$"):
        fit(sites, ASKED, FaultyTransport(sites, lambda site, *_: GONE if site == "s1" else _[1]), journal=journal)
    assert_bits(fit(sites_of(parts), ASKED, journal=journal), whole())


def test_masks_that_do_not_cancel_are_noticed():
    """A site that sends wrong masked numbers cannot change the result unnoticed."""
    sites = sites_of(by_turns(FRAME, 4))
    last: dict[int, bytes] = {}

    def copy(site, message, reply):
        read = asked(message)
        if kind(read) == "ask" and site == "s0":
            last[read.exchange] = reply
        return last[read.exchange] if kind(read) == "ask" and site == "s1" and read.exchange == 2 else reply

    with pytest.raises(FederationError, match="masks of the sites do not cancel"):
        fit(sites, ASKED, FaultyTransport(sites, copy), RunSettings(secure=True))


RANDOMISED = spec(solver="l2gd", max_iter=60, tol=1e-300, options={"L": 40.0, "mu": 1.0})


@pytest.mark.filterwarnings("ignore::covey.errors.ConvergenceWarning")
def test_sites_without_work_get_no_message(tmp_path):
    """The site of a cluster without work gets no message, and can still answer the next one."""
    parts = {name: FRAME.filter(pl.col("cluster") == name) for name in "abc"}
    expected = in_memory(FRAME, RANDOMISED)
    sites = sites_of(parts)
    outcome = fit(sites, RANDOMISED)
    assert {each.sites for each in outcome.exchanges if each.label == L2gdMove.label} == {1}
    np.testing.assert_array_equal(outcome.model.w, expected.w)

    sites, journal = sites_of(parts), tmp_path / "journal"
    with pytest.raises(Killed):
        fit(sites, RANDOMISED, Killing(sites, len(outcome.exchanges) // 2), journal=journal)
    np.testing.assert_array_equal(fit(sites, RANDOMISED, journal=journal).model.w, expected.w)
