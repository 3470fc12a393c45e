"""Damaged files, full disks and killed processes: each is detected or harmless, and ends with a sentence."""

import json
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from covey import HierarchicalRegressor, Penalty, load
from covey.datasets import simulate
from covey.errors import ConvergenceWarning, CoveyError, FederationError, FormulaError, ModelError
from covey.federation.operator.journal import Entry, Journal
from covey.fitting.fit import fit as fit_network
from covey.losses import Bernoulli
from covey.nodes.network import InMemory
from covey.problem.problem import Classes, resolve
from covey.problem.rows import read_rows
from covey.records import decode, encode
from covey.solvers import minimise
from covey.solvers.direct.sweep import SweepUp
from tests.federation.sites import FaultyTransport, by_turns, fit, kind, sites_of, spec, table

FRAME = table(5)
ABOUT = {"covey": "1", "roster": ("a", "b")}


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def some_bits(size: int, many: int = 300):
    """Bits of the whole file, those at its beginning and end among them."""
    bits = np.linspace(0, 8 * size - 1, many).astype(int).tolist()
    return sorted({*bits, *range(0, min(800, 8 * size), 7), *range(max(0, 8 * size - 200), 8 * size, 7)})


def test_a_flipped_bit_in_a_journal_is_detected(tmp_path):
    """One bit of an exponent once gave coefficients that were wrong by 7e59, and a fit that called itself converged."""
    path = tmp_path / "journal"
    journal = Journal(path, ABOUT, {"run": "r"})
    entries = [Entry("digest", encode(np.arange(at + 1.0))) for at in range(3)]
    for entry in entries:
        journal.add(entry)
    journal.close(done=False)
    whole = path.read_bytes()
    read = 0
    for bit in some_bits(len(whole)):
        path.write_bytes(flipped(whole, bit))
        with suppress(FederationError):
            # The end of the last line, which is as if the coordinator were killed, or a bit that base64 does not use.
            assert Journal(path, ABOUT, {"run": "r"}).entries in (entries, entries[:-1])
            read += 1
            continue
        assert path.read_bytes() == flipped(whole, bit)  # nothing was cut off
    assert read < 10
    path.write_bytes(whole[:-5])
    assert len(Journal(path, ABOUT, {"run": "r"}).entries) == 2


@cache
def small_problem():
    data = simulate("bernoulli", clusters=2, clients=6, rows=8, d=2, seed=1).data
    return data, Bernoulli(), Penalty.of(data.hierarchy, gamma=2.0, lam=2.0)


def test_a_flipped_bit_in_a_checkpoint_is_detected(tmp_path):
    path = tmp_path / "run"
    settings = {"solver": "newton", "tol": 1e-12}
    expected = minimise(*small_problem(), **settings, checkpoint=path)
    whole = path.read_bytes()
    for bit in some_bits(len(whole), 100):
        path.write_bytes(flipped(whole, bit))
        with pytest.raises(CoveyError, match="cannot be read; delete it"):
            minimise(*small_problem(), **settings, checkpoint=path)
    # Checkpoints of earlier versions have no checksum.
    path.write_bytes(b"covey\x02" + whole[22:])
    np.testing.assert_array_equal(minimise(*small_problem(), **settings, checkpoint=path).theta, expected.theta)


def test_a_flipped_bit_in_a_model_is_detected_or_harmless(tmp_path):
    model = HierarchicalRegressor(formula="y ~ x", client="client", cluster="cluster").fit(FRAME)
    folder = model.save(tmp_path / "model")
    expected, refused = model.predict(FRAME), 0
    for name in ("model.json", "clients.parquet", "clusters.parquet", "sums.parquet"):
        whole = (folder / name).read_bytes()
        for bit in some_bits(len(whole), 60):
            (folder / name).write_bytes(flipped(whole, bit))
            try:
                found = load(folder)
            except ModelError:
                refused += 1
            else:
                assert name == "model.json"  # a space, or the name of the checksum
                np.testing.assert_array_equal(found.predict(FRAME), expected)
        (folder / name).write_bytes(whole)
    assert refused > 500


def test_models_without_a_checksum_are_read(tmp_path):
    folder = HierarchicalRegressor(formula="y ~ x", client="client").fit(FRAME).save(tmp_path / "model")
    document = json.loads((folder / "model.json").read_text())
    assert len(document.pop("checksum")) == 64
    (folder / "model.json").write_text(json.dumps(document))
    assert load(folder).predict(FRAME).shape == (len(FRAME),)


# Convergence


def test_a_fit_with_absurd_coefficients_has_not_converged():
    """Whatever the gradient says: rounding at 1e60 makes it 'as small as float64 allows'."""
    data, problem = read_rows(FRAME.with_columns(y=FRAME["y"] * 1e40), resolve(spec(formula="y ~ x")))
    with pytest.warns(ConvergenceWarning, match="not plausible"):
        model = fit_network(InMemory.of(data, problem.loss), problem)
    assert not model.convergence.converged


def test_a_sum_with_a_wrong_exponent_does_not_pass_as_a_solution():
    """A site sends sums that have the right form and are wrong: the end is checked against what all sites say of it."""

    def wrong(site, message, reply):
        if site == "s1" and isinstance(decode(message).body, SweepUp):
            found = decode(reply)
            return encode(replace(found, body=replace(found.body, r=found.body.r * 2.0**200)))
        return reply

    sites = sites_of(by_turns(FRAME, 3))
    truth = fit(sites, spec())
    found = fit(sites_of(by_turns(FRAME, 3)), spec(), FaultyTransport(sites, wrong))
    assert not found.model.convergence.converged or np.abs(found.model.w - truth.model.w).max() < 1e-6


# Full disks


@contextmanager
def disk_of(size):
    """Files of this process cannot be larger: the write fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_stops_a_run_that_continues_later(tmp_path):
    sites, journal = sites_of(by_turns(FRAME, 3)), tmp_path / "run.journal"
    asked = spec(penalty="reml", gamma=None, lam=None)
    with disk_of(60_000), pytest.raises(FederationError, match=r"journal.*cannot be written.*make room.*same command again"):
        fit(sites, asked, journal=journal)
    assert journal.exists()
    said = []
    outcome = fit(sites, asked, journal=journal, say=said.append)
    assert any("continuing a run" in line for line in said)
    np.testing.assert_array_equal(outcome.model.w, fit(sites_of(by_turns(FRAME, 3)), asked).model.w)
    assert not journal.exists()


def test_a_full_disk_leaves_the_old_model(tmp_path):
    model = HierarchicalRegressor(formula="y ~ x", client="client").fit(FRAME)
    folder = model.save(tmp_path / "model")
    with disk_of(100), pytest.raises(ModelError, match=r"cannot be written to .*make room"):
        model.save(folder)
    np.testing.assert_array_equal(load(folder).predict(FRAME), model.predict(FRAME))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


# Ends of runs


def test_sites_delete_what_they_remember_of_a_run_that_stopped_for_good(tmp_path):
    def site_states():
        return list(tmp_path.glob("*/runs/*.state"))

    for site in (sites := sites_of(by_turns(FRAME, 3))).values():
        site.__init__(site.name, site.read, site.policy, home=tmp_path / site.name)

    def spoilt(site, message, reply):
        if site == "s1" and kind(decode(message)) == "ask":
            return encode(replace(decode(reply), body="nonsense"))
        return reply

    with pytest.raises(FederationError, match="in place of"):
        fit(sites, spec(), FaultyTransport(sites, spoilt))
    assert not site_states()
    # With a journal the run can continue, and the sites need what they have.
    journal = tmp_path / "journal"
    carrier = FaultyTransport(sites, lambda s, m, r: b"" if s == "s1" and decode(m).exchange > 1 else r)
    with pytest.raises(FederationError, match="same command again"):
        fit(sites, spec(), carrier, journal=journal)
    assert len(site_states()) == 3
    fit(sites, spec(), journal=journal)


STOPPED = """
import sys, time
from covey.cli import main
from covey.federation.site.site import Site
answer = Site.answer
Site.answer = lambda *a, **k: (print("asked", flush=True), time.sleep(0.2), answer(*a, **k))[2]
sys.argv = ["covey", "federate", "--simulate", "2", sys.argv[1], "y ~ x", "--client", "client", "--out", sys.argv[2],
            "--penalty", "reml"]
main()
"""


def test_a_coordinator_that_is_told_to_end_says_what_it_has_kept(tmp_path):
    FRAME.write_parquet(tmp_path / "rows.parquet")
    arguments = [str(tmp_path / "rows.parquet"), str(tmp_path / "out")]
    run = subprocess.Popen(
        [sys.executable, "-c", STOPPED, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        for _ in range(12):
            run.stdout.readline()
        run.send_signal(signal.SIGTERM)
        _, said = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == 130
    assert "the run has stopped" in said
    assert "Traceback" not in said


# Formulas and types that would take all memory


def test_a_formula_that_would_explode_is_refused_at_once(tmp_path):
    blow_up = "(" + " + ".join(f"I(x + {at})" for at in range(12)) + ")**12"
    start = time.perf_counter()
    with pytest.raises(FormulaError, match="more than 5,000 terms"):
        resolve(spec(formula=f"y ~ {blow_up}"))
    folder = HierarchicalRegressor(formula="y ~ x", client="client").fit(FRAME).save(tmp_path / "model")
    text = (folder / "model.json").read_text()
    document = json.loads(text)
    del document["checksum"]
    document["spec"]["formula"] = f"y ~ {blow_up}"
    (folder / "model.json").write_text(json.dumps(document))
    with pytest.raises(CoveyError, match="more than 5,000 terms"):
        load(folder)
    assert time.perf_counter() - start < 20
    shutil.rmtree(folder)


def test_a_giant_type_of_classes_takes_no_memory():
    assert Classes(("a", "b"), "<U400000000").array.nbytes < 100
