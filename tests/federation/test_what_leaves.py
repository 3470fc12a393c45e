"""Every letter of every solver is opened: only sums leave a site, and docs/privacy.md lists them all."""

import re
import warnings
from dataclasses import fields, replace
from functools import cache
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from covey.errors import ConvergenceWarning, CoveyError
from covey.exact import Exact
from covey.federation.operator.agreement import Joined, Profile, SiteTotals
from covey.federation.operator.coordinator import RunSettings
from covey.federation.privacy.accounting import privacy_of
from covey.records import decode
from tests.federation.sites import Meddling, dealt, fit, sites_of, spec, table

DOCS = Path(__file__).parents[2] / "docs" / "privacy.md"
CLIENTS, CLUSTERS = 21, 5  # clients of one site: 7, 6 and 8; no two sizes here are equal, and none is that of the terms
LEARNED = spec(gamma=None, lam=None, vary=["Intercept", "x"], tests=False)
RUNS = {
    "sweep": spec(),
    "newton": spec("bernoulli"),
    "newton, counts": spec("poisson"),
    "james_stein": spec("bernoulli", james_stein=True),
    "reml": LEARNED,
    "laplace": replace(LEARNED, family="poisson"),
    "l2gd": spec(solver="l2gd", max_iter=40),
    "one_coin": spec("bernoulli", solver="one_coin", max_iter=40),
    "al2sgd_plus": spec(solver="al2sgd_plus", max_iter=40),
}


def run(asked, **terms):
    frame = table(31, asked.family, clients=CLIENTS, clusters=CLUSTERS, rows=40).with_columns(
        client="patient " + pl.col("client")
    )
    owner = {f"patient c{i}": "a" if i < 7 else "b" if i < 13 else "c" for i in range(CLIENTS)}
    sites = sites_of(dealt(frame, owner))
    carrier = Meddling(sites)
    outcome = fit(sites, asked, carrier, RunSettings(**terms))
    return frame, sites, carrier, outcome


LONG = ("laplace", "one_coin", "al2sgd_plus")  # thousands of letters each
SOLVERS = [pytest.param(solver, marks=pytest.mark.federation) if solver in LONG else solver for solver in RUNS]


@cache
def ran(solver, secure=False):
    """One run serves all tests: they only read it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a few rounds show what travels
        return run(RUNS[solver], secure=secure)


def leaves(value, name=""):
    """Every array and number in a message, by name."""
    if isinstance(value, Exact):
        yield name, "exact", value.shape
    elif isinstance(value, np.ndarray):
        yield name, value.dtype.kind, value.shape
    elif isinstance(value, bool | str) or value is None:
        yield name, type(value).__name__, ()
    elif isinstance(value, int | float):
        yield name, "number", ()
    elif isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        for each in value:
            yield from leaves(each, name)
    else:
        items = value.items() if isinstance(value, dict) else ((part, getattr(value, part)) for part in _fields(value))
        for part, each in items:
            yield from leaves(each, part)


def _fields(value):
    return value._fields if hasattr(value, "_fields") else vars(value)


def replies(carrier, kind):
    """What was asked, and what came back."""
    for (_, letter), (site, reply) in zip(carrier.letters, carrier.replies, strict=True):
        asked = decode(letter)
        if asked.kind == kind:
            yield site, asked.body, decode(reply).body


def sizes(shape, d, points):
    """In the page's letters; ``points`` if the first is the number of points that were asked for at once."""
    named = {CLUSTERS: "k", d: "d", 2: "q"}
    words = [named.get(size, str(size)) for size in shape]
    return ", ".join(["m", *words[1:]] if points else words)


def told(carrier, d):
    """Each kind of reply in words: its fields and shapes."""
    rows = {}
    for _, request, reply in replies(carrier, "ask"):
        last = request.messages[-1] if hasattr(request, "messages") else request
        points = type(last).__name__ in ("Integrate", "Slope")
        parts = [
            f"{name} ({sizes(shape, d, points)})" if shape else name
            for name, _, shape in leaves(reply, "" if reply is None else "total")
        ]
        rows[type(last).__name__.lower()] = ", ".join(parts)
    return rows


@pytest.mark.parametrize("solver", SOLVERS)
def test_no_letter_has_as_many_of_anything_as_a_site_has_clients_or_rows(solver):
    _, sites, carrier, outcome = ran(solver)
    own = {name: sites[name].node(outcome.run).data for name in sites}
    for site, _, reply in replies(carrier, "ask"):
        for name, _, shape in leaves(reply):
            assert own[site].n_clients not in shape, f"{name} {shape}"
            assert own[site].n_rows not in shape, f"{name} {shape}"


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_page_lists_what_leaves(solver):
    _, _, carrier, outcome = ran(solver)
    assert told(carrier, len(outcome.model.terms)) == listed(solver)


def test_the_page_lists_what_leaves_before_the_fit():
    text = DOCS.read_text()
    named = {row: re.findall(r"`(\w+)`", re.search(rf"^\| {row} \| (.*?) \|", text, re.M)[1]) for row in ("hello", "agree")}
    assert sorted(named["hello"]) == sorted(part.name for part in fields(Profile))
    agree = [part.name for message in (Joined, SiteTotals) for part in fields(message)]
    assert sorted(each for each in named["agree"] if each != "standardize") == sorted(agree)


def test_the_page_lists_what_leaves_of_clients_with_one_row_each():
    frame = table(31, clients=CLIENTS, clusters=CLUSTERS, rows=1)
    sites = sites_of(dealt(frame, {f"c{i}": "abc"[i % 3] for i in range(CLIENTS)}))
    carrier = Meddling(sites)
    with pytest.raises(CoveyError, match="residual"):
        fit(sites, replace(LEARNED, vary=["Intercept"]), carrier)
    assert told(carrier, 4)["alike"] == listed("reml, one row a client")["alike"]


def listed(solver):
    """What the page says that a site sends, by exchange."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in DOCS.read_text().splitlines()]
    return {cells[1]: cells[2] for cells in rows if len(cells) == 4 and solver in cells[0].split("; ")}


@pytest.mark.parametrize("solver", SOLVERS)
def test_no_id_of_a_client_and_no_value_of_a_row_is_in_any_letter(solver):
    frame, _, carrier, _ = ran(solver)
    sent = b"\n".join(reply for _, reply in carrier.replies)
    assert b"patient" not in sent
    for value in frame["x"].to_list():
        assert np.float64(value).tobytes() not in sent


def test_the_page_lists_what_leaves_with_noise():
    known = {"z": ["z0", "z1", "z2"]}
    private, delta = privacy_of({"epsilon": 3.0, "categories": known}, "gaussian")
    _, _, carrier, outcome = run(spec(), private=private, delta=delta, categories=known)
    assert told(carrier, len(outcome.model.terms)) == {**listed("private"), "place": ""}
    for _, _, reply in replies(carrier, "agree"):
        totals = reply[1]
        assert not totals.rows.any()
        assert not totals.response.limbs.any()


def test_what_goes_down_names_no_client_and_no_site_but_those_of_the_roster():
    _, _, carrier, _ = ran("newton")
    sent = b"\n".join(letter for _, letter in carrier.letters)
    assert b"patient" not in sent


@pytest.mark.parametrize("solver", SOLVERS)
def test_under_masks_no_sum_of_a_site_can_be_read(solver):
    """What the coordinator gets holds none of the site's numbers, neither as they are nor in fixed point."""
    _, _, plain, _ = ran(solver)
    _, sites, masked, _ = ran(solver, secure=True)
    sent = dict.fromkeys(sites, b"")
    for site, reply in masked.replies:
        sent[site] += reply
    for site, _, reply in replies(plain, "ask"):
        for array in (each for each in arrays(reply) if each.size):
            for value in array.ravel():
                if abs(value) > 1e-6 and value != np.round(value):  # a zero or a count could be anywhere
                    assert np.float64(value).tobytes() not in sent[site]
                    assert Exact.of(value).limbs.tobytes() not in sent[site]


def arrays(value):
    if isinstance(value, Exact):
        yield value.floats()
    elif isinstance(value, np.ndarray):
        yield value.astype(np.float64)
    elif isinstance(value, float):
        yield np.array([value])
    elif isinstance(value, tuple):
        for each in value:
            yield from arrays(each)
    elif hasattr(value, "__dict__"):
        for each in vars(value).values():
            yield from arrays(each)


@pytest.mark.parametrize("solver", SOLVERS)
def test_under_masks_every_letter_of_the_fit_is_masked(solver):
    """Nothing bypasses the masks: what comes back is a skeleton without numbers, and limbs that are noise."""
    _, _, carrier, _ = ran(solver, secure=True)
    limbs = []
    for kind in ("ask", "agree"):
        for _, _, reply in replies(carrier, kind):
            skeleton, numbers = reply if kind == "ask" else reply[1]
            assert not [kind_ for _, kind_, _ in leaves_of_skeleton(skeleton) if kind_ in ("number", "f", "i", "u")]
            limbs.append(numbers.limbs.ravel())
            assert not numbers.size.any()  # nothing tells how large they are
    bits = np.unpackbits(np.concatenate(limbs).view(np.uint8))
    assert abs(bits.mean() - 0.5) < 5 * 0.5 / np.sqrt(len(bits))


def leaves_of_skeleton(skeleton):
    if type(skeleton).__name__ == "Hole":
        return
    if isinstance(skeleton, dict):
        for each in skeleton.values():
            yield from leaves_of_skeleton(each)
    elif isinstance(skeleton, tuple):
        for each in skeleton:
            yield from leaves_of_skeleton(each)
    else:
        yield from leaves(skeleton)
