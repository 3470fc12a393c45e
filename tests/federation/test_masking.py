"""Masks: totals are exact, partial sums are noise, and no combination of totals shows the sums of one site."""

from __future__ import annotations

import subprocess
import sys
import time
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from covey.errors import CoveyError
from covey.exact import Exact
from covey.federation.privacy.masking import Keys, check_keys, check_roster, mask, open_sealed, pair_secret, seal, unmask
from covey.kernels import TOO_LARGE

SITES = ["a", "bern", "c", "Delft", "\u00e9vora", "f"]
CHANCE = 1e-4  # keys are fixed, so a test that passes once passes always


def keys_of(names):
    return {name: Keys.fresh(bytes([at + 1]) * 32) for at, name in enumerate(names)}


def secrets_of(names, run="run"):
    """For each site its secrets with all others, each computed at that site."""
    keys = keys_of(names)
    return {own: {peer: pair_secret(keys[own], keys[peer].public, run) for peer in names if peer != own} for own in names}


def send(values, names, epoch=0, exchange=0, question=b""):
    secrets = secrets_of(names)
    return {own: mask(values[own], own, secrets[own], epoch, exchange, question) for own in names}


def chance_of_uniform_bytes(exact):
    """The p-value of a chi-square test for uniform bytes."""
    counts = np.bincount(np.frombuffer(exact.limbs.tobytes(), dtype=np.uint8), minlength=256)
    return stats.chisquare(counts).pvalue


@given(st.integers(2, 6).flatmap(lambda m: hnp.arrays(float, (m, 7), elements=st.floats(-(2.0**80), 2.0**80))), st.data())
def test_the_total_is_exact(values, data):
    names = data.draw(st.permutations(SITES))[: len(values)]
    parts = {name: Exact.of(row) for name, row in zip(names, values, strict=True)}
    replies = send(parts, names, data.draw(st.integers(0, 9)), data.draw(st.integers(0, 2**40)), data.draw(st.binary()))
    total = unmask(replies, names)
    assert total.limbs.tolist() == Exact.of(values).sum().limbs.tolist()
    np.testing.assert_array_equal(total.floats(), Exact.of(values).sum().floats())


def test_the_shape_is_kept():
    parts = {name: Exact.of(np.arange(6.0).reshape(2, 3)) for name in "ab"}
    np.testing.assert_array_equal(unmask(send(parts, ["a", "b"]), "ab").floats(), 2 * np.arange(6.0).reshape(2, 3))
    assert unmask(send({name: Exact.zeros(0) for name in "ab"}, ["a", "b"]), "ab").shape == (0,)


@pytest.mark.parametrize("names", [SITES[:2], SITES[:3], SITES])
def test_a_part_alone_looks_uniform_and_unrelated_to_its_values(names):
    plain = np.random.default_rng(0).normal(size=10_000)
    parts = {name: Exact.of(plain) for name in names}
    assert chance_of_uniform_bytes(parts["a"]) < 1e-100  # what the test would say of values without a mask
    for name, reply in send(parts, names).items():
        assert chance_of_uniform_bytes(reply) > CHANCE
        assert not set(reply.limbs[:, 0].tolist()) & set(parts[name].limbs[:, 0].tolist()) - {0}
        for limb in range(3):
            assert stats.pearsonr(plain, reply.limbs[:, limb].astype(float)).pvalue > CHANCE
            for bit in (0, 31, 63):
                shown = (reply.limbs[:, limb] >> np.uint64(bit)) & np.uint64(1)
                table = np.histogram2d(plain > 0, shown, bins=2)[0]
                assert stats.chi2_contingency(table).pvalue > CHANCE


def test_the_sum_of_any_part_of_the_roster_looks_uniform():
    names = SITES[:4]
    replies = send({name: Exact.of(np.full(4000, 3.25)) for name in names}, names)
    for m in range(1, 4):
        for some in combinations(names, m):
            together = Exact(
                np.stack([replies[name].limbs for name in some]), np.stack([replies[name].size for name in some])
            ).sum()
            assert chance_of_uniform_bytes(together) > CHANCE
    assert set(unmask(replies, names).floats()) == {13.0}


def test_no_two_streams_are_alike():
    """By epoch, exchange, question, roster, run, and which pair: the masks themselves, as sent for zeros."""
    names = SITES[:3]
    nothing = {name: Exact.zeros(500) for name in SITES}
    sent = [
        send(nothing, names)["a"],
        send(nothing, names, epoch=1)["a"],
        send(nothing, names, exchange=1)["a"],
        send(nothing, names, exchange=256)["a"],
        send(nothing, names, question=b"?")["a"],
        send(nothing, SITES[:2])["a"],
        mask(nothing["a"], "a", dict(zip(("bern", "d"), secrets_of(names)["a"].values(), strict=True)), 0, 0),
        mask(nothing["a"], "a", secrets_of(names, "other run")["a"], 0, 0),
        send(nothing, names)["bern"],
    ]
    for one, other in combinations(sent, 2):
        assert chance_of_uniform_bytes(one - other) > CHANCE
        assert not set(one.limbs.reshape(-1).tolist()) & set(other.limbs.reshape(-1).tolist())


def test_the_same_question_has_the_same_reply():
    parts = {name: Exact.of([1.0, -2.0]) for name in SITES}
    first, again = (send(parts, SITES, 2, 7, b"question") for _ in range(2))
    for name in SITES:
        assert first[name].limbs.tobytes() == again[name].limbs.tobytes()


def test_what_is_not_finite_comes_through_and_sizes_do_not():
    names = ["a", "bern", "c"]
    parts = {"a": Exact.of([1.0, np.nan, 2.0**90]), "bern": Exact.of([2.0, 1.0, 2.0**90]), "c": Exact.of([3.0, 1.0, -1.0])}
    replies = send(parts, names)
    assert {site: reply.size.tolist() for site, reply in replies.items()} == {
        "a": [0, TOO_LARGE, 0],
        "bern": [0, 0, 0],
        "c": [0, 0, 0],
    }
    np.testing.assert_array_equal(unmask(replies, names).floats(), [6.0, np.nan, 2.0**91])


@given(st.integers(2, 6), st.floats(0.1, 1.5))
def test_a_masked_total_never_wraps_around(m, share):
    """Parts whose sum is near or beyond 2^95: a number only if it is the right one."""
    names = SITES[:m]
    part = min(share * 2.0**95 / m, 2.0**93)
    parts = {name: Exact.of([part, part]).sum().reshape(1) for name in names}
    total = unmask(send(parts, names), names).floats()[0]
    assert np.isnan(total) or total == Exact.of(np.full(2 * m, part)).sum().floats()
    if part < 2.0**94 / m / 2.001:
        assert total == pytest.approx(2 * m * part)


def test_a_total_needs_the_whole_roster_and_nobody_else():
    names = ["a", "bern", "c"]
    replies = send({name: Exact.of([1.0]) for name in names}, names)
    with pytest.raises(CoveyError, match=r"cancel only over the whole roster .*missing: 'bern'; not on the roster: none"):
        unmask({"a": replies["a"], "c": replies["c"]}, names)
    with pytest.raises(CoveyError, match=r"cancel only over the whole roster .*missing: none; not on the roster: 'c'"):
        unmask(replies, ["a", "bern"])
    with pytest.raises(ValueError, match="same shape"):
        unmask({**replies, "c": Exact.zeros(2)}, names)


def test_a_site_alone_sends_nothing():
    with pytest.raises(CoveyError, match=r"Site 'a' needs another site"):
        mask(Exact.of([1.0]), "a", {}, 0, 0)
    with pytest.raises(CoveyError, match=r"Site 'a' needs another site"):
        mask(Exact.of([1.0]), "a", {"a": bytes(32), "b": bytes(32)}, 0, 0)


def test_keys():
    """Alice's keys of RFC 7748, section 6.1."""
    alice = Keys.fresh(bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a"))
    assert alice.public.hex() == "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a"
    assert Keys.fresh().private != Keys.fresh().private
    assert alice.private.hex() not in repr(alice)
    assert repr(alice.private) not in repr(alice)
    with pytest.raises(ValueError, match="32"):
        Keys.fresh(b"short")


def test_a_secret_is_shared_by_two_and_belongs_to_one_run():
    keys = keys_of(SITES[:3])
    a, b, c = (keys[name] for name in SITES[:3])
    assert pair_secret(a, b.public, "run") == pair_secret(b, a.public, "run")
    all_of_them = {pair_secret(*pair, run) for pair in ((a, b.public), (a, c.public), (b, c.public)) for run in ("run", "run2")}
    assert len(all_of_them) == 6
    for bad in (b"", bytes(31), bytes(32)):  # the last is a point of small order: every secret with it would be zero
        with pytest.raises(CoveyError, match=rf"public key of site 'bern' is not valid \({len(bad)} bytes, expected 32\)"):
            pair_secret(a, bad, "run", ("a", "bern"))


def test_two_sites_with_the_same_key_are_refused_and_do_not_get_the_same_secret():
    """Else a third site, between them in the order of names, would add and subtract the same stream."""
    public = {name: keys.public for name, keys in keys_of(SITES[:3]).items()}
    check_keys(public)
    with pytest.raises(CoveyError, match=r"Sites 'a' and 'c' have the same public key.*--home"):
        check_keys({**public, "c": public["a"]})
    a, b = keys_of(SITES[:2]).values()
    one, two = (pair_secret(b, a.public, "run", ("bern", name)) for name in ("a", "c"))
    assert one != two
    assert one == pair_secret(a, b.public, "run", ("a", "bern"))


@given(st.binary(max_size=100), st.text(max_size=20))
def test_what_is_sealed_opens_only_as_it_was_sent(text, context):
    key = pair_secret(Keys.fresh(bytes([1]) * 32), Keys.fresh(bytes([2]) * 32).public, "run")
    sealed = seal(key, text, context)
    assert open_sealed(key, sealed, context) == text
    assert seal(key, text, context) != sealed
    changed = [sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :] for at in (0, 12, len(sealed) - 1)]
    wrong = [(key, bad, context) for bad in (*changed, sealed[:-1], sealed[:20], b"")]
    for other_key, bad, about in [*wrong, (bytes(32), sealed, context), (key, sealed, context + "!")]:
        with pytest.raises(CoveyError, match=r"The sealed text .* cannot be opened"):
            open_sealed(other_key, bad, about)
    if len(text) > 3:
        assert text not in sealed


def test_a_smaller_roster():
    first = "abcde"
    check_roster([], ["a", "b"])
    check_roster([first], first)
    check_roster([first], ["a", "b", "c"])
    check_roster([first], ["a", "b"])
    check_roster([first, "abc"], first)
    with pytest.raises(CoveyError, match=r"only site 'e' drops out"):
        check_roster([first], ["a", "b", "c", "d"])
    with pytest.raises(CoveyError, match=r"two different sites or more. Got 'a'\."):
        check_roster([first], ["a"])
    with pytest.raises(CoveyError, match=r"two different sites or more. Got 'a', 'a', 'b'\."):
        check_roster([first], ["a", "a", "b"])
    with pytest.raises(CoveyError, match=r"Not in the run's first roster: 'z'"):
        check_roster([first], ["a", "z"])


def test_totals_that_show_one_site_only_together():
    """a = {a, b, c} + {a, d, e} - {a, b, c, d, e}, though each roster lacks two sites of another."""
    history = ["abcde", "abc"]
    with pytest.raises(CoveyError, match="the sums of site 'a' alone could be computed"):
        check_roster(history, ["a", "d", "e"])
    with pytest.raises(CoveyError, match="only site 'e' drops out"):
        check_roster(history, ["a", "b", "c", "d"])  # not lacking one site of the last epoch, but of the first


rosters = st.lists(st.sets(st.sampled_from("abcdef"), min_size=1), min_size=1, max_size=5)


@given(rosters)
def test_whatever_is_let_through_no_combination_of_totals_is_one_sites_part(asked):
    """A unit vector in the span of the rosters would be a combination that shows one site."""
    history = ["abcdef"]
    for roster in asked:
        try:
            check_roster(history, sorted(roster))
        except CoveyError:
            continue
        history.append("".join(sorted(roster)))
    totals = np.array([[float(site in epoch) for site in "abcdef"] for epoch in history])
    rank = np.linalg.matrix_rank(totals)
    for site in np.eye(6):
        assert np.linalg.matrix_rank(np.vstack([totals, site])) == rank + 1


def test_ten_thousand_values_among_ten_sites_take_milliseconds():
    names = [f"site {at}" for at in range(10)]
    values, secrets = Exact.of(np.random.default_rng(3).normal(size=10_000)), secrets_of(names)["site 0"]

    def seconds():
        start = time.perf_counter()
        mask(values, "site 0", secrets, 0, 0)
        return time.perf_counter() - start

    assert min(seconds() for _ in range(9)) < 0.05


def test_without_cryptography_one_sentence_says_what_to_install(monkeypatch):
    """Every run with masks makes its keys first."""
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric.x25519", None)
    with pytest.raises(CoveyError, match=r"pip install '\.\[flower\]'\.$"):
        Keys.fresh()


def test_it_is_imported_only_when_it_is_used():
    code = "import sys, covey.federation.privacy.masking; print('cryptography' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
