"""What goes wrong on the way, and what then happens: never a silent wrong answer."""

from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from covey.errors import CoveyError, FederationError
from covey.exact import TOO_LARGE
from covey.federation.operator.settings import RunSettings
from covey.federation.site.policy import Policy
from covey.federation.site.site import Site
from covey.federation.wire.codec import Envelope, Refusal
from covey.federation.wire.transport import Failure
from covey.nodes.network import Batch
from covey.records import decode, encode
from covey.solvers.first_order.l2gd import L2gdMove
from tests.federation.sites import Meddling, assert_same, by_turns, fit, in_memory, kind, sites_of, spec, split_by, table

FRAME = table(11, "bernoulli")
ASKED = spec("bernoulli", tol=1e-11)
GONE = Failure("gone", "it is not connected")


def whole(secure=False):
    """The run when nothing goes wrong."""
    sites = sites_of(by_turns(FRAME, 4))
    return fit(sites, ASKED, settings=RunSettings(secure=secure))


def asked(letter: bytes) -> Envelope:
    return decode(letter)


def when(site, exchange, act, times=1):
    """Meddle with the reply of one site to one exchange of the fit, the first few times."""
    left = [times]

    def meddle(name, letter, reply):
        read = asked(letter)
        if name == site and kind(read) == "ask" and read.exchange == exchange and not read.mute and left[0] > 0:
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
        lambda letter, reply: encode(Envelope("", -1, -1, Refusal("broken", "KeyError"))),
    ],
    ids=["gone", "late", "cut", "empty", "nonsense", "stale", "other run", "broken"],
)
def test_a_reply_that_is_none_is_asked_for_again(act, secure):
    sites = sites_of(by_turns(FRAME, 4))
    outcome = fit(sites, ASKED, Meddling(sites, when("s1", 2, act)), RunSettings(retries=1, secure=secure))
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
    journal, terms = tmp_path / "run.journal", RunSettings(secure=secure)
    sites = sites_of(by_turns(FRAME, 4))
    with pytest.raises(Killed):
        fit(sites, ASKED, Killing(sites, after), terms, journal=journal)
    second = Meddling(sites)
    outcome = fit(sites, ASKED, second, terms, journal=journal)
    assert_bits(outcome, whole(secure))
    assert len(outcome.exchanges) == len(whole(secure).exchanges)
    kinds = [kind(asked(letter)) for _, letter in second.letters]
    assert kinds.count("hello") == (4 if after == 0 else 0)


@pytest.mark.parametrize("cut", [1, 7, 60, 400])
def test_a_journal_cut_in_the_middle_of_a_word_loses_one_exchange_at_most(cut, tmp_path):
    """As when the coordinator dies while it writes."""
    journal, sites = tmp_path / "run.journal", sites_of(by_turns(FRAME, 4))
    with pytest.raises(Killed):
        fit(sites, ASKED, Killing(sites, 5, sent=False), journal=journal)
    journal.write_bytes(journal.read_bytes()[:-cut])
    assert_bits(fit(sites, ASKED, journal=journal), whole())


def test_a_journal_that_is_not_as_it_was_written_is_refused(tmp_path):
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
        if site == "s1" and kind(read) == "ask" and read.exchange == exchange and "s1" not in forgot:
            forgot.add("s1")
            carrier.inner._sites["s1"] = Site("s1", lambda _: parts["s1"], policy=Policy(1))
            return GONE
        return reply

    forgot: set[str] = set()
    carrier = Meddling(sites, forget)
    outcome = fit(sites, ASKED, carrier, RunSettings(retries=2))
    assert forgot
    assert_bits(outcome, whole())
    muted = [
        decode(reply) for (_, letter), (_, reply) in zip(carrier.letters, carrier.replies, strict=True) if asked(letter).mute
    ]
    assert [each.exchange for each in muted] == list(range(exchange))
    assert all(kind(each) == "ready" for each in muted)
    assert [each.body for each in muted[1:]] == [None] * (exchange - 1)
    assert len(muted[0].body) == 32  # a hash that says that its rows are the same
    reminded = sum(len(letter) for _, letter in carrier.letters)
    assert sum(each.down for each in outcome.exchanges) == reminded


@pytest.mark.parametrize("exchange", [1, 3])
@pytest.mark.parametrize(
    "change",
    [
        {"x": pl.col("x") + 1},
        {"y": 1 - pl.col("y")},
        {"client": pl.col("client") + "'"},
        {"cluster": pl.lit("a")},
        {"cluster": pl.lit("new")},
    ],
    ids=["x", "y", "client", "cluster", "new cluster"],
)
def test_a_site_without_its_memory_and_with_another_table_is_not_let_in_again(change, exchange):
    parts = by_turns(FRAME, 4)
    sites = sites_of(parts)

    def forget(site, letter, reply):
        if site == "s1" and kind(asked(letter)) == "ask" and asked(letter).exchange == exchange and not forgot:
            forgot.append(carrier.inner._sites.update(sites_of({"s1": parts["s1"].with_columns(**change)})))
            return GONE
        return reply

    forgot: list[None] = []
    carrier = Meddling(sites, forget)
    with pytest.raises(FederationError, match=r"Site 's1'.* (table has changed since|a cluster that it had not)"):
        fit(sites, ASKED, carrier, RunSettings(retries=2))
    assert forgot


@pytest.mark.parametrize("secure", [False, True])
def test_a_site_reopened_for_every_letter_remembers_all_it_needs(secure, tmp_path):
    """As Flower has it: a new process for each message."""
    parts = by_turns(FRAME, 4)

    class Reopened:
        def __init__(self, name):
            self.name = name

        def answer(self, letter):
            return Site(self.name, lambda _: parts[self.name], home=tmp_path / self.name, policy=Policy(1)).answer(letter)

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
    before = sites["s0"].node(outcome.run).coefficients().copy()
    old = [letter for site, letter in carrier.letters if site == "s0" and kind(asked(letter)) == "ask"]
    for letter in old:
        refusal = decode(sites["s0"].answer(letter)).body
        assert (refusal.reason, refusal.exchange) == ("stale", asked(old[-1]).exchange + 1)
    last = next(letter for site, letter in reversed(carrier.letters) if site == "s0")
    assert sites["s0"].answer(last) == next(reply for site, reply in reversed(carrier.replies) if site == "s0")
    forged = encode(replace(asked(last), body=replace(asked(last).body, wbar=asked(last).body.wbar + 1)))
    assert decode(sites["s0"].answer(forged)).body.reason == "stale"
    ahead = encode(replace(asked(last), exchange=99))
    assert decode(sites["s0"].answer(ahead)).body.reason == "behind"
    np.testing.assert_array_equal(sites["s0"].node(outcome.run).coefficients(), before)


@pytest.mark.parametrize(
    "change", [{"x": pl.col("x") + 1}, {"client": "new " + pl.col("client")}, {"cluster": pl.col("cluster").replace("a", "b")}]
)
def test_a_table_that_changes_under_a_run_is_noticed(change, tmp_path):
    parts = by_turns(FRAME, 4)

    class Reopened:
        def __init__(self, name):
            self.name = name

        def answer(self, letter):
            part = parts[self.name]
            if asked(letter).exchange >= 3 and self.name == "s3":
                part = part.with_columns(**change)
            return Site(self.name, lambda _: part, home=tmp_path / self.name, policy=Policy(1)).answer(letter)

    with pytest.raises(FederationError, match="Site 's3': The table has changed since the run began"):
        fit({name: Reopened(name) for name in parts}, ASKED)


def test_under_masks_one_site_alone_is_not_left_out_afterwards():
    """The totals with and without it would show its part by difference; two that are lost together hide each other."""
    clients = FRAME["client"].unique(maintain_order=True).to_list()
    parts = split_by(FRAME, {client: f"s{at % 4}" for at, client in enumerate(clients)})  # every cluster is at every site
    sites = sites_of(parts)
    terms = RunSettings(secure=True, retries=0)

    def gone(*lost):
        return lambda site, letter, reply: GONE if site in lost and asked(letter).exchange >= 2 else reply

    with pytest.raises(FederationError, match="Without 's2' the totals would show its part by difference"):
        fit(sites, ASKED, Meddling(sites, gone("s2")), terms, on_loss="continue")
    sites = sites_of(parts)
    outcome = fit(sites, ASKED, Meddling(sites, gone("s2", "s3")), terms, on_loss="continue")
    assert outcome.roster == ("s0", "s1")
    lost = parts["s2"]["client"].to_list() + parts["s3"]["client"].to_list()
    left = {name: site for name, site in sites.items() if name in outcome.roster}
    assert_same(outcome, left, in_memory(FRAME.filter(~FRAME["client"].is_in(lost)), ASKED))


def test_under_masks_two_that_are_lost_together_hide_each_other_only_in_clusters_that_both_have():
    sites = sites_of(by_turns(FRAME, 5))

    def gone(site, letter, reply):
        return GONE if site in ("s2", "s4") and asked(letter).exchange >= 2 else reply  # of these s4 alone has cluster a

    with pytest.raises(FederationError, match="Without 's4' the totals would show its part by difference"):
        fit(sites, ASKED, Meddling(sites, gone), RunSettings(secure=True, retries=0), on_loss="continue")


def test_under_masks_the_same_goes_for_categories():
    clients = FRAME["client"].unique(maintain_order=True).to_list()
    rare = pl.when(pl.col("client").is_in([clients[0], clients[2]])).then(pl.lit("rare")).otherwise(pl.col("z"))
    parts = split_by(FRAME.with_columns(z=rare), {client: f"s{at % 4}" for at, client in enumerate(clients)})
    sites = sites_of(parts)

    def gone(site, letter, reply):
        return GONE if site in ("s2", "s3") and asked(letter).exchange >= 2 else reply  # rare is at s0 and s2

    with pytest.raises(FederationError, match=r"takes two different sites or more. Got 's0'|Without 's2' the totals"):
        fit(sites, ASKED, Meddling(sites, gone), RunSettings(secure=True, retries=0), on_loss="continue")


@pytest.mark.parametrize("family", ["gaussian", "bernoulli"])
def test_under_masks_what_is_not_finite_is_seen_and_its_site_named(family):
    frame, given = table(11, family), spec(family)

    def act(_, reply):
        read = decode(reply)
        skeleton, numbers = read.body
        size = numbers.size.copy()
        size[0] = TOO_LARGE  # as NaN comes out of masks
        return encode(replace(read, body=(skeleton, replace(numbers, size=size))))

    sites = sites_of(by_turns(frame, 4))
    with pytest.raises(FederationError, match="Lost site 's1' sent a number that is not finite"):
        fit(sites, given, Meddling(sites, when("s1", 1, act, times=99)), RunSettings(secure=True))
    sites = sites_of(by_turns(frame, 4))
    with pytest.raises(FederationError, match="Lost site 's1' sent a masked reply that cannot be read"):
        fit(sites, given, Meddling(sites, when("s1", 1, lambda _, reply: encode(replace(decode(reply), body=3)), times=99)),
            RunSettings(secure=True))  # fmt: skip


def test_of_two_sites_that_differ_in_form_neither_is_taken_for_the_right_one():
    def act(_, reply):
        read = decode(reply)
        return encode(replace(read, body=replace(read.body, force=read.body.force[:2])))

    sites = sites_of(by_turns(FRAME, 2))
    with pytest.raises(FederationError, match=r"Lost sites 's0' sent a reply of another form .* 's1' sent a reply"):
        fit(sites, ASKED, Meddling(sites, when("s0", 2, act, times=99)))


def test_a_step_so_long_that_numbers_overflow_costs_no_site():
    """Of counts with a heavy-tailed covariate Newton's first steps overflow at one site: they are halved, as in memory."""
    rng = np.random.default_rng(8)
    client = np.repeat(np.arange(12), 5)
    x, exposure = 10 * np.exp(2 * rng.normal(size=60)), 8 * rng.normal(size=60)
    y = rng.poisson(np.exp(np.clip(0.3 + 0.5 * rng.normal(size=12)[client], -3, 3)))
    frame = pl.DataFrame({"client": client, "cluster": client % 2, "x": x, "exposure": exposure, "y": y})
    given = spec("poisson", formula="y ~ x", offset="exposure", gamma=0.01, lam=1.0)
    sites = sites_of({f"s{at}": frame.filter(pl.col("client") % 2 == at) for at in range(2)})
    carrier = Meddling(sites)
    outcome = fit(sites, given, carrier, on_loss="continue")
    assert not outcome.without
    values = [getattr(decode(reply).body, "value", 0.0) for _, reply in carrier.replies]
    assert np.isinf(values).any(), "no step was so long"
    np.testing.assert_allclose(outcome.model.w, in_memory(frame, given).w, atol=1e-7)


def test_a_site_that_is_lost_at_the_end(tmp_path):
    """The operator's model is there by then; the run can be taken up, or ends and says who was not told."""
    journal, out = tmp_path / "journal", tmp_path / "model"

    def gone(site, letter, reply):
        return GONE if site == "s1" and kind(asked(letter)) == "deliver" else reply

    sites = sites_of(by_turns(FRAME, 4))
    with pytest.raises(FederationError, match=r"Lost site 's1' .* exchanges are kept"):
        fit(sites, ASKED, Meddling(sites, gone), journal=journal, out=out)
    assert (out / "model.json").exists()
    again = Meddling(sites)
    outcome = fit(sites, ASKED, again, journal=journal, out=out)
    assert {kind(asked(letter)) for _, letter in again.letters} == {"deliver"}
    assert not outcome.missed
    sites = sites_of(by_turns(FRAME, 4))
    outcome = fit(sites, ASKED, Meddling(sites, gone), journal=journal, on_loss="continue")
    assert (outcome.roster, dict(outcome.without), list(outcome.missed)) == (("s0", "s1", "s2", "s3"), {}, ["s1"])
    assert_bits(outcome, whole())
    assert not journal.exists()


def test_a_run_that_was_refused_is_not_in_the_way_of_the_next(tmp_path):
    """Of mistakes that no exchange will mend nothing is kept: the same command with a mended table starts anew."""
    journal, parts = tmp_path / "journal", by_turns(FRAME, 4)
    twice = {**parts, "s2": pl.concat([parts["s2"], parts["s0"].filter(pl.col("client") == "c0")])}
    with pytest.raises(FederationError, match="A client with the same id"):
        fit(sites_of(twice), ASKED, journal=journal)
    assert not journal.exists()
    with pytest.raises(CoveyError, match="There is no column"):
        fit(sites_of(parts), replace(ASKED, formula="y ~ xx"), journal=journal)
    sites = sites_of(parts)
    with pytest.raises(FederationError, match=r"Lost site 's1' .*the run has stopped\.$"):
        fit(sites, ASKED, Meddling(sites, lambda site, *_: GONE if site == "s1" else _[1]), journal=journal)
    assert_bits(fit(sites_of(parts), ASKED, journal=journal), whole())


def test_under_masks_a_site_that_lost_its_key_ends_the_run():
    parts = by_turns(FRAME, 4)
    sites = sites_of(parts)

    def forget(site, letter, reply):
        if site == "s1" and kind(asked(letter)) == "ask" and asked(letter).exchange == 2:
            carrier.inner._sites["s1"] = Site("s1", lambda _: parts["s1"], policy=Policy(1))
            return GONE
        return reply

    carrier = Meddling(sites, forget)
    with pytest.raises(CoveyError, match="'s1'"):
        fit(sites, ASKED, carrier, RunSettings(secure=True))


def test_masks_that_do_not_cancel_are_noticed():
    """A site that sends another site's masked numbers, or any others, does not shift the result unseen."""
    sites = sites_of(by_turns(FRAME, 4))
    last: dict[int, bytes] = {}

    def copy(site, letter, reply):
        read = asked(letter)
        if kind(read) == "ask" and site == "s0":
            last[read.exchange] = reply
        return last[read.exchange] if kind(read) == "ask" and site == "s1" and read.exchange == 2 else reply

    with pytest.raises(FederationError, match="masks of the sites do not cancel"):
        fit(sites, ASKED, Meddling(sites, copy), RunSettings(secure=True))


BY_COINS = spec(solver="l2gd", max_iter=60, tol=1e-300, options={"L": 40.0, "mu": 1.0})


@pytest.mark.filterwarnings("ignore::covey.errors.ConvergenceWarning")
def test_sites_that_an_exchange_does_not_concern_are_left_alone(tmp_path):
    """A cluster that waits for an exchange between clusters has no work; its site gets no letter, and is not out of step."""
    parts = {name: FRAME.filter(pl.col("cluster") == name) for name in "abc"}
    expected = in_memory(FRAME, BY_COINS)
    sites = sites_of(parts)
    carrier = Meddling(sites)
    outcome = fit(sites, BY_COINS, carrier)
    rounds = [each for each in outcome.exchanges if each.label == L2gdMove.label]
    assert {each.sites for each in rounds} == {1, 2, 3}
    np.testing.assert_array_equal(outcome.model.w, expected.w)

    def has_move(body):
        return any(isinstance(each, L2gdMove) for each in (body.messages if isinstance(body, Batch) else (body,)))

    gone = [asked(letter).exchange for site, letter in carrier.letters if site == "b" and has_move(asked(letter).body)]
    at = gone[len(gone) // 2]  # where b is asked again after it was left alone, and has lost its memory

    def forget(site, letter, reply):
        if site == "b" and asked(letter).exchange == at and not forgot:
            forgot.append(carrier.inner._sites.update(sites_of({"b": parts["b"]})))
            return GONE
        return reply

    forgot: list[None] = []
    sites = sites_of(parts)
    carrier = Meddling(sites, forget)
    np.testing.assert_array_equal(fit(sites, BY_COINS, carrier, RunSettings(retries=2)).model.w, expected.w)
    assert forgot
    sites, journal = sites_of(parts), tmp_path / "journal"
    with pytest.raises(Killed):
        fit(sites, BY_COINS, Killing(sites, at), journal=journal)
    np.testing.assert_array_equal(fit(sites, BY_COINS, journal=journal).model.w, expected.w)
