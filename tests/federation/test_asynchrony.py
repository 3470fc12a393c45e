"""Clusters that share no site do not wait for each other, and nothing but the times changes."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime
from functools import cache

import numpy as np
import polars as pl
import pytest

from covey.errors import FederationError
from covey.federation.operator.settings import RunSettings
from covey.federation.wire.transport import Failure, InProcess
from covey.records import decode
from covey.solvers.clock import Durations, seconds
from covey.solvers.first_order.al2sgd_plus import KatyushaMove
from covey.solvers.first_order.l2gd import L2gdMove
from tests.federation.sites import Threaded, fit, in_memory, sites_of, spec, table

FRAME = table(11, "gaussian", clusters=4, clients=16)
FIRST = pl.col("client").is_in(["c0", "c4"])
PARTS = {  # three lanes: two sites with one cluster, a site with two, and a site with one
    "s0": FRAME.filter((pl.col("cluster") == "a") & FIRST),
    "s1": FRAME.filter((pl.col("cluster") == "a") & ~FIRST),
    "s2": FRAME.filter(pl.col("cluster").is_in(["b", "c"])),
    "s3": FRAME.filter(pl.col("cluster") == "d"),
}
KNOWN = {"L": 40.0, "mu": 1.0, "every": 60}
OPTIONS = {
    "l2gd": {"p0": 0.04, "p": 0.3, **KNOWN},
    "l2gd with participation": {"p0": 0.2, "p": 0.3, "participation": 0.6, **KNOWN},
    "one_coin": {"p": 0.2, **KNOWN},
    "al2sgd_plus": {"p0": 0.04, "p": 0.3, "rho": 0.03, "L_row": 90.0, "mu": 1.0, "every": 60},
    "proxskip": {"p": 0.2, **KNOWN},
}
pytestmark = pytest.mark.filterwarnings("ignore::covey.errors.ConvergenceWarning")


def asked_of(solver):
    return spec(solver=solver.split()[0], max_iter=60, tol=1e-300, options=OPTIONS[solver])


@cache
def expected(solver="l2gd"):
    return in_memory(FRAME, asked_of(solver))


def assert_same(outcome, solver="l2gd"):
    np.testing.assert_array_equal(outcome.model.w, expected(solver).w)
    np.testing.assert_array_equal(outcome.model.wbar, expected(solver).wbar)


def audit(home, site):
    lines = map(json.loads, (home / site / "audit.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == "message"]


@pytest.mark.parametrize("solver", OPTIONS)
def test_nothing_but_the_times_changes(solver, tmp_path):
    """Bits are those in memory; what is sent is the same as if one site answered after the other, for each site in order."""
    found = []
    for name in ("in turn", "threads"):
        sites = sites_of(PARTS, home=tmp_path / name)
        outcome = fit(sites, asked_of(solver), Threaded(sites, {"s0": 0.002}) if name == "threads" else None)
        assert_same(outcome, solver)
        kept = ("kind", "epoch", "exchange", "in", "out")
        logs = {site: [tuple(line[key] for key in kept) for line in audit(tmp_path / name, site)] for site in sites}
        found.append((logs, [(each.label, each.sites, each.down, each.up) for each in outcome.exchanges]))
    assert found[0] == found[1]


def test_other_clusters_do_not_wait_for_a_slow_site(tmp_path):
    """By the times of the audit logs. One site is ten times slower; in these iterations no exchange is between clusters."""
    sites = sites_of(PARTS, home=tmp_path)
    alone = {**OPTIONS["l2gd"], "p0": 1e-9}
    outcome = fit(sites, replace(asked_of("l2gd"), options=alone), Threaded(sites, dict.fromkeys(sites, 0.008) | {"s3": 0.08}))
    assert outcome.model.convergence.iterations == 60
    moves = {site: [line["time"] for line in audit(tmp_path, site) if "l2gd move" in line["kind"]] for site in sites}
    first, last = ({site: datetime.fromisoformat(times[at]).timestamp() for site, times in moves.items()} for at in (0, -1))
    seconds = {site: last[site] - min(first.values()) for site in sites}
    assert min(map(len, moves.values())) > 5
    assert max(seconds[site] for site in ("s0", "s1", "s2")) < seconds["s3"] / 2


class Killed(BaseException):
    """The coordinator's process ends here."""


@pytest.mark.parametrize("after", [25, 45, 60])
def test_a_killed_coordinator_resumes_to_the_same_bits(after, tmp_path):
    """Lanes are at different places then, and the journal has their exchanges in the order in which they ended."""
    journal, sites, left = tmp_path / "journal", sites_of(PARTS, home=tmp_path), [after]

    class Killing(Threaded):
        def pull(self, wait):
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return super().pull(wait)

    with pytest.raises(Killed):
        fit(sites, asked_of("l2gd"), Killing(sites, {"s3": 0.004}), journal=journal)
    again = sites_of(PARTS, home=tmp_path)  # the sites have restarted too
    assert_same(fit(again, asked_of("l2gd"), Threaded(again, {"s0": 0.004}), journal=journal))


class Leaves(Threaded):
    """Site s2 is away from a message on, or for a few messages."""

    first, until = 8, 10**9

    def _answer(self, site, message, number):
        if site == "s2" and self.first <= number < self.until:
            self.came.put((site, number, Failure("it is not connected")))
        else:
            super()._answer(site, message, number)


def test_a_site_that_fails_ends_the_run_with_a_sentence_and_it_continues(tmp_path):
    journal, sites = tmp_path / "journal", sites_of(PARTS)
    with pytest.raises(FederationError, match=r"^Site 's2' is lost: .*; the run has stopped. \d+ messages are"):
        fit(sites, asked_of("l2gd"), Leaves(sites, {"s3": 0.01}), journal=journal)
    assert_same(fit(sites, asked_of("l2gd"), Threaded(sites), journal=journal))


def test_other_clusters_go_on_while_a_site_is_asked_again():
    class Pauses(Leaves):
        until = 10

    sites = sites_of(PARTS)
    assert_same(fit(sites, asked_of("l2gd"), Pauses(sites), RunSettings(retries=3, pause=0.05, timeout=5.0)))


def test_a_run_continues_without_a_lost_site():
    """Replies to messages of the first start come late; nobody takes them for replies of the second."""
    sites = sites_of(PARTS)
    outcome = fit(sites, asked_of("l2gd"), Leaves(sites, {"s3": 0.02}), on_loss="continue")
    left = FRAME.filter(~pl.col("cluster").is_in(["b", "c"]))
    model = in_memory(left, asked_of("l2gd"))
    assert list(outcome.without) == ["s2"]
    np.testing.assert_array_equal(outcome.model.w, model.w)


def test_with_masks_all_clusters_are_one_lane():
    """A masked sum needs all sites, so that each message goes to all of them; bits are the same."""
    parts = {"s0": FRAME.filter(FIRST | pl.col("client").is_in(["c1", "c2", "c3"]))}
    parts["s1"] = FRAME.filter(~pl.col("client").is_in(parts["s0"]["client"].to_list()))
    sites = sites_of(parts)
    outcome = fit(sites, asked_of("l2gd"), Threaded(sites), RunSettings(secure=True, timeout=5.0))
    assert_same(outcome)
    assert {each.sites for each in outcome.exchanges if each.phase == "fit"} == {2}


class VirtualTime(InProcess):
    """Sites that take ``step (k,)`` seconds for a local step of their clusters, on a clock that does not tick by itself."""

    def __init__(self, sites, step):
        super().__init__(sites)
        self.step, self.now, self.ready = np.array(step), 0.0, {}

    def push(self, messages, timeout):
        for site, reply in self.exchange(messages, timeout).items():
            body = decode(messages[site]).body
            seconds = 0.0
            if isinstance(body, L2gdMove | KatyushaMove):
                here = self._sites[site].node(decode(messages[site]).run).data.hierarchy.sizes > 0
                seconds = float((body.move.steps * self.step)[here].max())
            self.ready[site] = self.now + seconds, reply

    def pull(self, wait):
        self.now = min(at for at, _ in self.ready.values())
        came = {site: reply for site, (at, reply) in self.ready.items() if at == self.now}
        self.ready = {site: each for site, each in self.ready.items() if site not in came}
        return came


@pytest.mark.parametrize("solver", ["l2gd", "l2gd with participation", "al2sgd_plus"])
@pytest.mark.parametrize("mode", ["rounds", "asynchronous"])
def test_the_network_takes_the_time_of_the_clock(solver, mode):
    """A site for each cluster is the asynchronous mode of the clock; masks make it that of rounds."""
    step, secure = [0.3, 1.0, 0.2, 3.0], mode == "rounds"
    owner = pl.col("client").str.slice(1).cast(pl.Int64) // 4 % 2 if secure else pl.col("cluster")
    parts = {f"s{name}": part for (name,), part in FRAME.group_by(owner, maintain_order=True)}
    carrier = VirtualTime(sites_of(parts), step)
    outcome = fit(carrier._sites, asked_of(solver), carrier, RunSettings(secure=secure))
    assert_same(outcome, solver)
    lasts = Durations(np.array(step), *np.zeros((3, 4)))
    assert carrier.now == pytest.approx(seconds(outcome.model.course.schedule, 0, 60, lasts, mode))
