"""All replies of all solvers are decoded: only sums leave a site, and docs/reference/messages.md lists them."""

import re
import warnings
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import ForwardRef, get_args, get_origin, get_type_hints

import numpy as np
import polars as pl
import pytest

from covey.errors import ConvergenceWarning, CoveyError
from covey.exact import Exact
from covey.federation.operator.settings import RunSettings
from covey.federation.privacy.differential import privacy_of
from covey.federation.wire.codec import Placeholder
from covey.federation.wire.messages import SiteMessage
from covey.nodes.network import Batch, Message
from covey.records import Record, decode
from covey.variance.evidence import CountUnlike
from covey.variance.linear_likelihood import IntegrateClients, LikelihoodSlope
from covey.variance.quadrature import IntegrateAtMode
from tests.federation.sites import FaultyTransport, fit, kind, sites_of, spec, split_by, table

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "messages.md"
# Clients of one site: 6, 8 and 9. No two sizes here are equal, and none is that of the terms or of a quadrature (7 nodes).
CLIENTS, CLUSTERS = 23, 5
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
    "apgd": spec("bernoulli", solver="apgd", max_iter=40),
    "proxskip": spec(solver="proxskip", max_iter=40),
}


def run(asked, **terms):
    frame = table(31, asked.family, clients=CLIENTS, clusters=CLUSTERS, rows=40).with_columns(
        client="patient " + pl.col("client")
    )
    owner = {f"patient c{i}": "a" if i < 6 else "b" if i < 12 else "c" for i in range(CLIENTS)}
    sites = sites_of(split_by(frame, owner))
    carrier = FaultyTransport(sites)
    outcome = fit(sites, asked, carrier, RunSettings(**terms))
    return frame, sites, carrier, outcome


LONG = ("laplace", "one_coin", "al2sgd_plus", "proxskip")  # thousands of messages each
SOLVERS = [pytest.param(solver, marks=pytest.mark.federation) if solver in LONG else solver for solver in RUNS]


@cache
def ran(solver, secure=False):
    """One run for all tests, which only read it."""
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


def replies(carrier, what):
    """What was asked, and what came back."""
    for (_, message), (site, reply) in zip(carrier.messages, carrier.replies, strict=True):
        asked = decode(message)
        if kind(asked) == what:
            yield site, asked.body, decode(reply).body


def sizes(shape, d, points):
    """In the page's symbols; ``points`` if the first is the number of points that were asked for at once."""
    named = {CLUSTERS: "k", d: "d", 2: "q"}
    words = [named.get(size, str(size)) for size in shape]
    return ", ".join(["m", *words[1:]] if points else words)


def sent(carrier, d):
    """Each kind of reply in words, by the label of its message: its fields and shapes."""
    rows = {}
    for _, request, reply in replies(carrier, "ask"):
        last = request.messages[-1] if isinstance(request, Batch) else request
        points = isinstance(last, IntegrateClients | LikelihoodSlope | IntegrateAtMode)
        parts = [
            f"{name} ({sizes(shape, d, points)})" if shape else name
            for name, _, shape in leaves(reply, "" if reply is None else "total")
        ]
        rows[last.label] = ", ".join(parts)
    return rows


# What is declared


def messages():
    """Every message there is: those that register themselves when their solvers are imported."""
    found = [each for each in Record.registered.values() if issubclass(each, Message) and is_dataclass(each)]
    return [each for each in found if each.__module__.startswith("covey.") and each is not Batch]


def reply_of(message):
    """The class, or classes, of the reply that a message declares."""
    (base,) = [each for each in message.__orig_bases__ if issubclass(get_origin(each) or each, Message)]
    (reply,) = get_args(base)
    parts = get_args(reply) if get_origin(reply) is tuple else (reply,)
    return [Record.registered[each.__forward_arg__] if isinstance(each, ForwardRef) else each for each in parts]


def declared(reply, name="total"):
    """The names of all numbers and arrays in a reply, by its declaration alone."""
    if not (isinstance(reply, type) and issubclass(reply, Record)) or reply is Exact:
        return [name]
    hints = get_type_hints(reply)
    return [each for part in fields(reply) for each in declared(hints[part.name], part.name)]


def page(heading):
    """The rows of the tables below a heading of the page, as lists of cells."""
    part = DOCS.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in part.splitlines() if line.startswith("| ")]
    return rows[1:]


@pytest.mark.parametrize("message", [each for each in messages() if each.reply and not issubclass(each, SiteMessage)])
def test_the_page_has_every_message_with_what_it_declares(message):
    """A new message fails here until the page has a row for it; running this file as a module fills in its reply."""
    rows = [cells for cells in page("In the fit") if cells[1] == message.label]
    assert rows, f"docs/reference/messages.md has no row for the exchange {message.label!r} ({message.__name__})"
    (reply,) = reply_of(message)
    for cells in rows:
        assert cells[2] == message.phase
        assert re.sub(r" \([^)]*\)", "", cells[3]).split(", ") == ([""] if reply in (None, type(None)) else declared(reply))


def test_the_page_has_every_message_to_a_site_itself():
    rows = {cells[0]: cells[1] for cells in page("Before the fit") + page("After the fit")}
    found = [each for each in messages() if issubclass(each, SiteMessage)]
    assert set(rows) == {each.label for each in found}
    for message in found:
        fields_ = [name for reply in reply_of(message) if reply not in (None, type(None)) for name in names_of(reply)]
        assert sorted(set(re.findall(r"`(\w+)`", rows[message.label])) - {"standardize"}) == sorted(set(fields_))


def names_of(reply):
    return [part.name for part in fields(reply)]


def test_the_page_has_every_message_without_a_reply():
    (line,) = [line for line in DOCS.read_text().split("\n\n") if line.startswith("Messages without a reply")]
    assert set(re.findall(r"`([^`]+)`", line)) == {each.label for each in messages() if not each.reply}


def test_labels_are_different():
    labels = [each.label for each in messages()]
    assert len(set(labels)) == len(labels)


# What is sent


@pytest.mark.parametrize("solver", SOLVERS)
def test_no_message_has_as_many_of_anything_as_a_site_has_clients_or_rows(solver):
    _, sites, carrier, outcome = ran(solver)
    own = {name: sites[name].node(outcome.run).data for name in sites}
    for site, _, reply in replies(carrier, "ask"):
        for name, _, shape in leaves(reply):
            assert own[site].n_clients not in shape, f"{name} {shape}"
            assert own[site].n_rows not in shape, f"{name} {shape}"


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_page_lists_what_leaves(solver):
    _, _, carrier, outcome = ran(solver)
    assert sent(carrier, len(outcome.model.terms)) == listed(solver)


def test_the_page_lists_what_leaves_of_clients_with_one_row_each():
    frame = table(31, clients=CLIENTS, clusters=CLUSTERS, rows=1)
    sites = sites_of(split_by(frame, {f"c{i}": "abc"[i % 3] for i in range(CLIENTS)}))
    carrier = FaultyTransport(sites)
    with pytest.raises(CoveyError, match="residual"):
        fit(sites, replace(LEARNED, vary=["Intercept"]), carrier)
    label = CountUnlike.label
    assert sent(carrier, 4)[label] == listed("reml, one row a client")[label]


def listed(solver):
    """What the page says that a site sends, by exchange."""
    return {cells[1]: cells[3] for cells in page("In the fit") if solver in cells[0].split("; ")}


@pytest.mark.parametrize("solver", SOLVERS)
def test_no_id_of_a_client_and_no_value_of_a_row_is_in_any_message(solver):
    frame, _, carrier, _ = ran(solver)
    every = b"\n".join(reply for _, reply in carrier.replies)
    assert b"patient" not in every
    for value in frame["x"].to_list():
        assert np.float64(value).tobytes() not in every


def test_the_page_lists_what_leaves_with_noise():
    known = {"z": ["z0", "z1", "z2"]}
    private, delta = privacy_of({"epsilon": 3.0, "categories": known}, "gaussian")
    _, _, carrier, outcome = run(spec(), private=private, delta=delta, categories=known)
    assert sent(carrier, len(outcome.model.terms)) == listed("private")
    for _, _, reply in replies(carrier, "agree"):
        totals = reply[1]
        assert not totals.rows.any()
        assert not totals.response.limbs.any()


def test_what_goes_down_names_no_client_and_no_site_but_those_of_the_roster():
    _, _, carrier, _ = ran("newton")
    assert b"patient" not in b"\n".join(message for _, message in carrier.messages)


@pytest.mark.parametrize("solver", SOLVERS)
def test_under_masks_no_sum_of_a_site_can_be_read(solver):
    """No reply holds a number of the site, neither as a float nor in fixed point."""
    _, _, plain, _ = ran(solver)
    _, sites, masked, _ = ran(solver, secure=True)
    sent_by = {site: b"".join(reply for name, reply in masked.replies if name == site) for site in sites}
    for site, text in sent_by.items():
        parts = [array.ravel() for name, _, reply in replies(plain, "ask") if name == site for array in arrays(reply)]
        values = np.unique(np.concatenate(parts))
        values = values[(np.abs(values) > 1e-6) & (values != np.round(values))]  # a zero or a count could be anywhere
        assert len(values)
        words = np.sort(np.concatenate([np.frombuffer(text[at:], "<u8", (len(text) - at) // 8) for at in range(8)]))
        assert not among(values.view("<u8"), words).any()
        limbs = Exact.of(values).limbs
        for each in limbs[among(limbs, words).all(axis=1)]:  # each limb is somewhere, as zeros are: not all in a row
            assert each.tobytes() not in text


def among(values, words):
    """Which of some numbers are among sorted ones."""
    return words[np.minimum(np.searchsorted(words, values), len(words) - 1)] == values


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
def test_under_masks_every_message_of_the_fit_is_masked(solver):
    """Nothing bypasses the masks: what comes back is a skeleton without numbers, and limbs that are noise."""
    _, _, carrier, _ = ran(solver, secure=True)
    limbs = []
    for what in ("ask", "agree"):
        for _, _, reply in replies(carrier, what):
            skeleton, numbers = reply if what == "ask" else reply[1]
            assert not [kind_ for _, kind_, _ in leaves_of_skeleton(skeleton) if kind_ in ("number", "f", "i", "u")]
            limbs.append(numbers.limbs.ravel())
            assert not numbers.size.any()  # nothing tells how large they are
    bits = np.unpackbits(np.concatenate(limbs).view(np.uint8))
    assert abs(bits.mean() - 0.5) < 5 * 0.5 / np.sqrt(len(bits))


def leaves_of_skeleton(skeleton):
    if isinstance(skeleton, Placeholder):
        return
    if isinstance(skeleton, Record):
        for each in vars(skeleton).values():
            yield from leaves_of_skeleton(each)
    elif isinstance(skeleton, tuple):
        for each in skeleton:
            yield from leaves_of_skeleton(each)
    else:
        yield from leaves(skeleton)


def rewritten():
    """The page with what every solver sends today; words and messages of new solvers are for people to write."""
    found = {solver: sent(ran(solver)[2], len(ran(solver)[3].model.terms)) for solver in RUNS}
    phases = {each.label: each.phase for each in messages()}
    lines = []
    for line in DOCS.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        solver = cells[0].split("; ")[0]
        if len(cells) == 5 and cells[1] in found.get(solver, {}):
            line = f"| {cells[0]} | {cells[1]} | {phases[cells[1]]} | {found[solver][cells[1]]} | {cells[4]} |"
        lines.append(line)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":  # python -m tests.federation.test_what_leaves
    DOCS.write_text(rewritten())
