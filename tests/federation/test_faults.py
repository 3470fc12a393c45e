"""What goes wrong on the way, and what then happens: never a silent wrong answer."""

from dataclasses import replace

import numpy as np
import pytest

from covey.errors import CoveyError, FederationError
from covey.federation.coordinator import Terms
from covey.federation.letters import Letter, Refusal, decode, encode
from covey.federation.site import Site
from covey.federation.transport import Failure
from tests.federation.sites import Meddling, assert_same, by_turns, fit, in_memory, sites_of, spec, table

FRAME = table(11, "bernoulli")
ASKED = spec("bernoulli", tol=1e-11)
GONE = Failure("gone", "it is not connected")


def whole(secure=False):
    """The run when nothing goes wrong."""
    sites = sites_of(by_turns(FRAME, 4))
    return fit(sites, ASKED, terms=Terms(secure=secure))


def asked(letter: bytes) -> Letter:
    return decode(letter)


def when(site, exchange, act, times=1):
    """Meddle with the reply of one site to one exchange of the fit, the first few times."""
    left = [times]

    def meddle(name, letter, reply):
        read = asked(letter)
        if name == site and read.kind == "ask" and read.exchange == exchange and not read.mute and left[0] > 0:
            left[0] -= 1
            return act(letter, reply)
        return reply

    return meddle


def assert_bits(one, two):
    np.testing.assert_array_equal(one.model.w, two.model.w)
    np.testing.assert_array_equal(one.model.wbar, two.model.wbar)


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize(
    "act",
    [
        lambda letter, reply: GONE,
        lambda letter, reply: Failure("late", "no answer in 1 s"),
        lambda letter, reply: reply[: len(reply) // 2],
        lambda letter, reply: b"",
        lambda letter, reply: encode("hello there"),
        lambda letter, reply: encode(replace(decode(reply), exchange=decode(reply).exchange - 1)),
        lambda letter, reply: encode(replace(decode(reply), run="another")),
        lambda letter, reply: encode(Letter("", -1, -1, "refusal", Refusal("broken", "KeyError"))),
    ],
    ids=["gone", "late", "cut", "empty", "nonsense", "stale", "other run", "broken"],
)
def test_a_reply_that_is_none_is_asked_for_again(act, secure):
    sites = sites_of(by_turns(FRAME, 4))
    outcome = fit(sites, ASKED, Meddling(sites, when("s1", 2, act)), Terms(retries=1, secure=secure))
    assert_bits(outcome, whole(secure))
    assert not outcome.without


def test_a_site_that_stays_away_stops_the_run_and_the_run_goes_on_when_it_is_back(tmp_path):
    sites, journal = sites_of(by_turns(FRAME, 4)), tmp_path / "run.journal"
    away = Meddling(sites, when("s2", 3, lambda *_: GONE, times=99))
    with pytest.raises(
        FederationError, match=r"Lost site .s2. did not answer .gone: it is not connected.; the run has stopped"
    ):
        fit(sites, ASKED, away, journal=journal)
    back = Meddling(sites)
    outcome = fit(sites, ASKED, back, journal=journal)
    assert_bits(outcome, whole())
    assert min(asked(letter).exchange for _, letter in back.letters) == 3
    assert not journal.exists()


def test_or_goes_on_without_it_and_says_so():
    parts = by_turns(FRAME, 4)
    sites = sites_of(parts)
    away = Meddling(sites, lambda site, letter, reply: GONE if site == "s2" and asked(letter).exchange >= 3 else reply)
    outcome = fit(sites, ASKED, away, on_loss="continue")
    assert outcome.roster == ("s0", "s1", "s3")
    assert outcome.without == {"s2": "did not answer (gone: it is not connected)"}
    left = FRAME.filter(~FRAME["client"].is_in(parts["s2"]["client"].to_list()))
    assert_same(outcome, {name: site for name, site in sites.items() if name != "s2"}, in_memory(left, ASKED))
    assert int(outcome.model.clients_of_cluster.sum()) == left["client"].n_unique()


def test_a_run_that_went_on_without_a_site_is_taken_up_as_it_was(tmp_path):
    sites, journal = sites_of(by_turns(FRAME, 4)), tmp_path / "run.journal"

    def gone(site, letter, reply):
        return GONE if site == "s2" and asked(letter).exchange >= 3 else reply

    expected = fit(sites_of(by_turns(FRAME, 4)), ASKED, Meddling(sites, gone), on_loss="continue")
    sites = sites_of(by_turns(FRAME, 4))
    with pytest.raises(Killed):
        fit(sites, ASKED, Killing(sites, 9, gone), on_loss="continue", journal=journal)
    outcome = fit(sites, ASKED, Meddling(sites, gone), on_loss="continue", journal=journal)
    assert_bits(outcome, expected)
    assert outcome.without == expected.without


class Killed(BaseException):
    """The coordinator's process ends here."""


class Killing(Meddling):
    """The coordinator dies after so many exchanges; the sites have had its next letters, or not."""

    def __init__(self, sites, after, meddle=None, *, sent=True):
        super().__init__(sites, meddle)
        self.left, self.sent = after, sent

    def exchange(self, letters, timeout):
        if self.left == 0 and not self.sent:
            raise Killed
        came = super().exchange(letters, timeout)
        self.left -= 1
        if self.left < 0:
            raise Killed
        return came


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("after", range(0, 10, 3))
def test_a_coordinator_that_is_killed_goes_on_to_the_same_bits(after, secure, tmp_path):
    journal, terms = tmp_path / "run.journal", Terms(secure=secure)
    sites = sites_of(by_turns(FRAME, 4))
    with pytest.raises(Killed):
        fit(sites, ASKED, Killing(sites, after), terms, journal=journal)
    second = Meddling(sites)
    outcome = fit(sites, ASKED, second, terms, journal=journal)
    assert_bits(outcome, whole(secure))
    assert len(outcome.exchanges) == len(whole(secure).exchanges)
    kinds = [asked(letter).kind for _, letter in second.letters]
    assert kinds.count("hello") == (4 if after == 0 else 0)


@pytest.mark.parametrize("cut", [1, 7, 60, 400])
def test_a_journal_cut_in_the_middle_of_a_word_loses_one_exchange_at_most(cut, tmp_path):
    """As when the coordinator dies while it writes."""
    journal, sites = tmp_path / "run.journal", sites_of(by_turns(FRAME, 4))
    with pytest.raises(Killed):
        fit(sites, ASKED, Killing(sites, 5, sent=False), journal=journal)
    journal.write_bytes(journal.read_bytes()[:-cut])
    assert_bits(fit(sites, ASKED, journal=journal), whole())


def test_a_journal_of_another_run_is_refused(tmp_path):
    journal, sites = tmp_path / "run.journal", sites_of(by_turns(FRAME, 4))
    with pytest.raises(Killed):
        fit(sites, ASKED, Killing(sites, 5), journal=journal)
    with pytest.raises(FederationError, match=r"of another run .other spec.; delete it"):
        fit(sites, replace(ASKED, gamma=3.0), journal=journal)
    journal.write_bytes(b"something else")
    with pytest.raises(FederationError, match="cannot be read; delete it"):
        fit(sites, ASKED, journal=journal)


@pytest.mark.parametrize("exchange", [1, 2, 5])
def test_a_site_that_lost_its_memory_is_told_all_letters_again_and_sends_nothing_twice(exchange):
    parts = by_turns(FRAME, 4)
    sites = sites_of(parts)

    def forget(site, letter, reply):
        read = asked(letter)
        if site == "s1" and read.kind == "ask" and read.exchange == exchange and "s1" not in forgot:
            forgot.add("s1")
            carrier.inner._sites["s1"] = Site("s1", lambda _: parts["s1"], minimum=1)
            return GONE
        return reply

    forgot: set[str] = set()
    carrier = Meddling(sites, forget)
    outcome = fit(sites, ASKED, carrier, Terms(retries=2))
    assert forgot
    assert_bits(outcome, whole())
    muted = [
        decode(reply) for (_, letter), (_, reply) in zip(carrier.letters, carrier.replies, strict=True) if asked(letter).mute
    ]
    assert [each.exchange for each in muted] == list(range(exchange))
    assert all(each.kind == "ready" and each.body is None for each in muted)


@pytest.mark.parametrize("secure", [False, True])
def test_a_site_reopened_for_every_letter_remembers_all_it_needs(secure, tmp_path):
    """As Flower has it: a new process for each message."""
    parts = by_turns(FRAME, 4)

    class Reopened:
        def __init__(self, name):
            self.name = name

        def answer(self, letter):
            return Site(self.name, lambda _: parts[self.name], home=tmp_path / self.name, minimum=1).answer(letter)

    sites = {name: Reopened(name) for name in parts}
    assert_bits(fit(sites, ASKED, terms=Terms(secure=secure)), whole(secure))
    assert (tmp_path / "s0" / "model" / "model.json").exists()
    state = next((tmp_path / "s0" / "runs").iterdir())
    assert state.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda body: replace(body, value=float("nan")), "sent a value that is not a number"),
        (lambda body: replace(body, force=np.full_like(body.force, np.nan)), "sent a value that is not a number"),
        (lambda body: replace(body, force=body.force[:2]), "another form or shape than the other sites"),
        (lambda body: replace(body, force=body.force.astype(np.int64)), "another form or shape"),
        (lambda body: (body,), "another form or shape"),
    ],
)
def test_numbers_that_cannot_be_added_are_not(spoil, why):
    def act(_, reply):
        read = decode(reply)
        return encode(replace(read, body=spoil(read.body)))

    sites = sites_of(by_turns(FRAME, 4))
    with pytest.raises(FederationError, match=f"Lost site 's1' .*{why}"):
        fit(sites, ASKED, Meddling(sites, when("s1", 2, act, times=99)))
    parts = by_turns(FRAME, 4)
    sites = sites_of(parts)
    outcome = fit(sites, ASKED, Meddling(sites, when("s1", 2, act, times=1)), on_loss="continue")
    assert list(outcome.without) == ["s1"]


def test_letters_out_of_turn_are_refused_and_change_nothing():
    sites = sites_of(by_turns(FRAME, 4))
    carrier = Meddling(sites)
    outcome = fit(sites, ASKED, carrier)
    before = sites["s0"].node(outcome.run).where().copy()
    old = [letter for site, letter in carrier.letters if site == "s0" and asked(letter).kind == "ask"]
    for letter in old:
        refusal = decode(sites["s0"].answer(letter)).body
        assert (refusal.reason, refusal.exchange) == ("stale", asked(old[-1]).exchange + 1)
    last = next(letter for site, letter in reversed(carrier.letters) if site == "s0")
    assert sites["s0"].answer(last) == next(reply for site, reply in reversed(carrier.replies) if site == "s0")
    forged = encode(replace(asked(last), body=replace(asked(last).body, wbar=asked(last).body.wbar + 1)))
    assert decode(sites["s0"].answer(forged)).body.reason == "stale"
    ahead = encode(replace(asked(last), exchange=99))
    assert decode(sites["s0"].answer(ahead)).body.reason == "behind"
    np.testing.assert_array_equal(sites["s0"].node(outcome.run).where(), before)


def test_a_table_that_changes_under_a_run_is_noticed(tmp_path):
    parts = by_turns(FRAME, 4)

    class Reopened:
        def __init__(self, name):
            self.name = name

        def answer(self, letter):
            part = parts[self.name]
            if asked(letter).exchange >= 3 and self.name == "s3":
                part = part.with_columns(x=part["x"] + 1)
            return Site(self.name, lambda _: part, home=tmp_path / self.name, minimum=1).answer(letter)

    with pytest.raises(FederationError, match="Site 's3': The table has changed since the run began"):
        fit({name: Reopened(name) for name in parts}, ASKED)


def test_under_masks_one_site_alone_is_not_left_out_afterwards():
    """The totals with and without it would show its part by difference; two that are lost together hide each other."""
    sites = sites_of(by_turns(FRAME, 5))
    terms = Terms(secure=True, retries=0)

    def gone(*lost):
        return lambda site, letter, reply: GONE if site in lost and asked(letter).exchange >= 2 else reply

    with pytest.raises(FederationError, match="Without 's2' the totals would show its part by difference"):
        fit(sites, ASKED, Meddling(sites, gone("s2")), terms, on_loss="continue")
    parts = by_turns(FRAME, 5)
    sites = sites_of(parts)
    outcome = fit(sites, ASKED, Meddling(sites, gone("s2", "s4")), terms, on_loss="continue")
    assert outcome.roster == ("s0", "s1", "s3")
    lost = parts["s2"]["client"].to_list() + parts["s4"]["client"].to_list()
    left = {name: site for name, site in sites.items() if name in outcome.roster}
    assert_same(outcome, left, in_memory(FRAME.filter(~FRAME["client"].is_in(lost)), ASKED))


def test_under_masks_a_site_that_lost_its_key_ends_the_run():
    parts = by_turns(FRAME, 4)
    sites = sites_of(parts)

    def forget(site, letter, reply):
        if site == "s1" and asked(letter).kind == "ask" and asked(letter).exchange == 2:
            carrier.inner._sites["s1"] = Site("s1", lambda _: parts["s1"], minimum=1)
            return GONE
        return reply

    carrier = Meddling(sites, forget)
    with pytest.raises(CoveyError, match="'s1'"):
        fit(sites, ASKED, carrier, Terms(secure=True))


def test_masks_that_do_not_cancel_are_noticed():
    """A site that sends another site's masked numbers, or any others, does not shift the result unseen."""
    sites = sites_of(by_turns(FRAME, 4))
    last: dict[int, bytes] = {}

    def copy(site, letter, reply):
        read = asked(letter)
        if read.kind == "ask" and site == "s0":
            last[read.exchange] = reply
        return last[read.exchange] if read.kind == "ask" and site == "s1" and read.exchange == 2 else reply

    with pytest.raises(FederationError, match="masks of the sites do not cancel"):
        fit(sites, ASKED, Meddling(sites, copy), Terms(secure=True))
