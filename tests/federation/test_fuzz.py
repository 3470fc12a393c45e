"""Fuzzing of the decoder, a node and a coordinator: no unclean exception, no hang, bounded memory.

Each target gets ``COVEY_FUZZ_SECONDS`` seconds: 5 by default, ten minutes in ``make test-federation``.
``COVEY_FUZZ_SEED`` repeats a failure.
"""

import json
import os
import random
import re
import resource
import signal
import struct
import time
from contextlib import contextmanager, suppress

import pytest

from covey.errors import CoveyError
from covey.federation.operator.settings import RunSettings
from covey.federation.wire.codec import Envelope, Refusal
from covey.records import RecordError, decode, encode, seal
from tests.federation.sites import FaultyTransport, by_turns, fit, sites_of, spec, table

pytestmark = [pytest.mark.federation, pytest.mark.filterwarnings("ignore")]

SECONDS = float(os.environ.get("COVEY_FUZZ_SECONDS", "5"))
SEED = int(os.environ.get("COVEY_FUZZ_SEED", str(time.time_ns() % 10**9)))
LONGEST, MEGABYTES = 30, 600  # of one case; of all cases together, above the memory at the start
HEAD = 22  # bytes before the length of the header
SPECS = [
    spec(),
    spec("bernoulli"),
    spec(penalty="reml", gamma=None, lam=None),
    spec("poisson", penalty="ml", gamma=None, lam=None),
    spec(solver="l2gd", max_iter=50),
    spec(standardize=True),
]
VALUES = [
    None, True, 0, -1, 2**31, 2**63, 10**30, 0.5, 1e300, -1e300, 5e-324, float("nan"), float("inf"), "", "a", "\x1b[2J",
    "x" * 2000, {"all": []}, {"all": [1, "a", None]}, {"by": []}, {"by": [["a", 1], [2, 3]]}, {"by": [[{"all": []}, 1]]},
    {"array": 0}, {"bytes": 0}, {"array": 10**9}, {"array": -1}, {}, [], [[]], {"all": 3}, {"is": []},
    {"is": "Count", "has": {"number": -5}}, {"is": "Exact", "has": {}}, {"is": "nothing", "has": {}},
    {"is": "Envelope", "has": {"run": 1, "epoch": "x", "exchange": None}},
    {"is": "Privacy", "has": {"noise": 1, "clip": 0, "rounds": 1}},
    {"is": "Refusal", "has": {"reason": "\x1b", "sentence": {"all": []}, "exchange": "x"}},
]  # fmt: skip
ARRAYS = [
    ["<f8", [0]], ["<f8", [2, 2]], ["<U400000000", [1]], ["|O", [1]], ["<f8", [2**40]], ["<f8", [-1]], ["<i8", []], [0, 0], [],
]  # fmt: skip
NUMBERS = [0.0, -1.0, float("nan"), float("inf"), 1e300, -1e300, 1e-300, 2.0**53]


def mutated(text: bytes, rng: random.Random) -> bytes:
    """An encoded record with some changes, most of them with a right checksum."""
    kind = rng.random()
    if kind < 0.1:
        content = bytearray(text)
        for _ in range(rng.randint(1, 8)):
            content[rng.randrange(len(content))] = rng.randrange(256)
        return bytes(content[: rng.randint(0, len(content))] if rng.random() < 0.3 else content)
    size = int.from_bytes(text[HEAD : HEAD + 4], "little")
    body = bytearray(text[HEAD + 4 + size :])
    if kind < 0.4 and len(body) >= 8:
        for _ in range(rng.randint(1, 4)):
            at = 8 * rng.randrange(len(body) // 8)
            body[at : at + 8] = rng.choice([struct.pack("<d", rng.choice(NUMBERS)), rng.randbytes(8)])
        return seal(text[HEAD : HEAD + 4 + size] + bytes(body))
    head = json.loads(text[HEAD + 4 : HEAD + 4 + size])
    for _ in range(rng.randint(1, 3)):
        change(head, rng)
    changed = json.dumps(head).encode()
    return seal(len(changed).to_bytes(4, "little") + changed + bytes(body))


def change(head, rng: random.Random) -> None:
    """Replace, remove or exchange a value somewhere in a header."""
    places = []
    waiting = [head]
    while waiting:
        here = waiting.pop()
        for key, value in here.items() if isinstance(here, dict) else enumerate(here):
            places.append((here, key))
            if isinstance(value, dict | list):
                waiting.append(value)
    if not places:
        return
    here, key = rng.choice(places)
    action = rng.random()
    if action < 0.7:
        here[key] = json.loads(json.dumps(rng.choice(ARRAYS if here is head.get("arrays") else VALUES)))
    elif action < 0.85:
        del here[key]
    else:
        there, other = rng.choice(places)
        here[key] = json.loads(json.dumps(there[other])) if there is not head else 0


@contextmanager
def in_time():
    """End a case that takes too much time of the processor, or that waits for something; other programs may slow it down."""

    def late(*_):
        raise AssertionError(f"a case took more than {LONGEST} seconds")

    limits = {signal.SIGPROF: (signal.ITIMER_PROF, LONGEST), signal.SIGALRM: (signal.ITIMER_REAL, 20 * LONGEST)}
    before = {each: signal.signal(each, late) for each in limits}
    for timer, seconds in limits.values():
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for each, (timer, _) in limits.items():
            signal.setitimer(timer, 0)
            signal.signal(each, before[each])


def cases(report):
    """Random generators for as long as the test lasts; a failure names the seed of its case."""
    start, memory, count = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    while time.monotonic() - start < SECONDS:
        seed = SEED + count
        try:
            with in_time():
                yield random.Random(seed)
        except GeneratorExit:
            print(f"failed with COVEY_FUZZ_SEED={seed}")
            raise
        count += 1
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / 1024
    report(f"{count} cases in {SECONDS:g} s, memory grew by {grown:.0f} MB")
    assert grown < MEGABYTES


@pytest.fixture(scope="module")
def recorded():
    """Messages and replies of runs with several solvers, by site."""
    found = []
    for asked in SPECS:
        frame = table(3, asked.family)
        for secure in (False, True):
            sites = sites_of(by_turns(frame, 3))
            carrier = FaultyTransport(sites)
            fit(sites, asked, carrier, RunSettings(secure=secure))
            found.append((asked, secure, carrier.messages, [reply for _, reply in carrier.replies]))
    return found


def test_decoder(recorded, capsys):
    texts = [text for _, _, messages, replies in recorded for text in [*(each for _, each in messages), *replies]]
    for rng in cases(print):
        text = mutated(rng.choice(texts), rng)
        with suppress(RecordError):
            decode(text, 1 << 25)


def test_node(recorded, capsys):
    """A site answers each message, and every answer is a record; it is asked in the order of a run, with changes."""
    for rng in cases(print):
        asked, _, messages, _ = rng.choice(recorded)
        site = sites_of(by_turns(table(3, asked.family), 3))["s1"]
        mine = [message for name, message in messages if name == "s1"]
        stop = rng.randrange(len(mine)) % 12
        for message in mine[:stop]:
            site.answer(message)
        for _ in range(5):
            reply = decode(site.answer(mutated(mine[stop], rng)))
            assert isinstance(reply, Envelope)
            if isinstance(reply.body, Refusal) and reply.body.reason == "broken":
                assert re.fullmatch(r"\w+ in covey [\w.]+", reply.body.sentence)  # no data of the site


def test_coordinator(recorded, capsys):
    """One site changes some of its replies; the run ends with a model or with one printable sentence."""
    for rng in cases(print):
        asked, secure, _, _ = rng.choice(recorded)
        often = rng.choice([0.05, 0.3, 1.0])

        def fault(site, message, reply, often=often, rng=rng):
            if site != "s1" or rng.random() > often:
                return reply
            return mutated(encode(decode(reply)), rng)

        sites = sites_of(by_turns(table(3, asked.family), rng.choice([2, 3])))
        settings = RunSettings(secure=secure, retries=rng.choice([0, 1]))
        on_loss, said = rng.choice(["stop", "continue"]), ""
        try:
            fit(sites, asked, FaultyTransport(sites, fault), settings, on_loss=on_loss)
        except CoveyError as problem:
            said = str(problem)
        assert said.isprintable()
        assert len(said) < 5_000
