"""Mutated bytes against the decoder, a site and the coordinator: clean refusals, no program error, no hang, bounded memory.

``COVEY_FUZZ_SECONDS`` says how long each part runs; ``make test-federation`` runs each for ten minutes.
"""

from __future__ import annotations

import os
import re
import resource
import time

import numpy as np
import pytest

from covey.errors import CoveyError
from covey.federation.operator.settings import RunSettings
from covey.federation.site.policy import Policy
from covey.federation.site.site import Site
from covey.federation.wire.codec import Envelope, Refusal
from covey.records import RecordError, decode

from .sites import FaultyTransport, by_turns, fit, sites_of, spec, table

SECONDS = float(os.environ.get("COVEY_FUZZ_SECONDS", "5"))
MEMORY = 2**30  # bytes that a part may take beyond what the process had

pytestmark = pytest.mark.federation


@pytest.fixture(autouse=True)
def bounded_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < MEMORY


def recorded(**asked):
    sites = sites_of(by_turns(table(1), 2))
    carrier = FaultyTransport(sites)
    fit(sites, spec(**asked), carrier)
    return carrier


def mutated(rng, text: bytes) -> bytes:
    """The bytes with a few changed, cut, repeated or with a number in the header replaced."""
    kind = rng.integers(5)
    data = bytearray(text)
    at, more = (int(each) for each in rng.integers(0, len(data), 2))
    if kind == 0:
        data[at] = int(rng.integers(256))
    elif kind == 1:
        del data[min(at, more) : max(at, more)]
    elif kind == 2:
        data[at:at] = data[min(at, more) : max(at, more)]
    elif kind == 3:
        word = [b"1", b"-1", b"1e999", b"null", b"true", b'"x"', b"[]", b"99999999999", b"{}"][int(rng.integers(9))]
        digits = [k for k, each in enumerate(data) if chr(each).isdigit()]
        place = digits[int(rng.integers(len(digits)))]
        data[place : place + 1] = word
    else:
        for place in rng.integers(0, len(data), 8).tolist():
            data[place] ^= 1 << int(rng.integers(8))
    return bytes(data)


def test_the_decoder_decodes_or_refuses():
    rng, texts, end = np.random.default_rng(0), [message for _, message in recorded().messages], time.monotonic() + SECONDS
    while time.monotonic() < end:
        try:
            decode(mutated(rng, texts[int(rng.integers(len(texts)))]))
        except RecordError:
            continue


def test_a_site_answers_or_refuses_every_message(capsys):
    """A mutated message may be refused as a program error, with the name of its class only; it must not spoil the next one."""
    rng, parts, end = np.random.default_rng(1), by_turns(table(1), 2), time.monotonic() + SECONDS
    carriers = [recorded(), recorded(solver="newton"), recorded(gamma=None)]
    texts = [message for carrier in carriers for site, message in carrier.messages if site == "s0"]
    while time.monotonic() < end:
        site = Site("s0", lambda _: parts["s0"], Policy(1))
        for message in texts[: int(rng.integers(len(texts)))]:
            for each in (mutated(rng, message), message):
                began = time.monotonic()
                reply = decode(site.answer(each))
                assert isinstance(reply, Envelope)
                assert time.monotonic() - began < 5.0
                if isinstance(reply.body, Refusal) and reply.body.reason == "broken":
                    assert each is not message, capsys.readouterr().err[-3000:]
                    assert re.fullmatch(r"\w+ in covey [\w.]+", reply.body.sentence)
        capsys.readouterr()


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::covey.errors.ConvergenceWarning")
def test_a_coordinator_ends_with_a_sentence():
    """Whatever one site sends, the run ends with the right numbers or an error of covey."""
    rng, parts, end = np.random.default_rng(2), by_turns(table(1), 2), time.monotonic() + SECONDS
    while time.monotonic() < end:
        when = int(rng.integers(12))
        count = iter(range(10**6))

        def fault(site, message, reply, when=when, count=count):
            return mutated(rng, reply) if next(count) == when else reply

        sites, sentence = sites_of(parts), ""
        try:
            fit(sites, spec(), FaultyTransport(sites, fault), RunSettings(retries=0, timeout=1.0))
        except CoveyError as problem:
            sentence = str(problem)
        assert "\x1b" not in sentence
