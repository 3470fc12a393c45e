"""Real deployments: sites and coordinator on real SuperNodes, with TLS and node keys, compared with the fit in memory."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from datetime import datetime

import numpy as np
import polars as pl
import pytest

from covey._version import __version__
from covey.model.files import load_model
from covey.problem.problem import Spec
from tests.fits import fit_table

from .conftest import deployed
from .deployment import until

STATES = {"east": ["IN", "MA", "PA"], "north": ["MI", "MN", "ND", "WI"], "south": ["AZ"], "west": ["MO"]}
SETTINGS = {"client": "county", "cluster": "state", "gamma": 10.0, "lam": 5.0, "timeout": 120.0}
FAMILIES = {
    "sweep": {"formula": "log_radon ~ floor", "solver": "sweep"},
    "newton": {"formula": "high ~ floor", "family": "bernoulli", "solver": "newton"},
}


def start_sites(deployment, homes, sites):
    """Each site with the homes of its states, and one state of each with its neighbour: clusters are split across nodes."""
    names = sorted(sites)
    deployment.register(*names)
    place = {state: site for site, states in STATES.items() for state in states if site in names}
    county = homes["county"].rank("dense")
    at = [
        names[(names.index(place[state]) + (state in ("IN", "MN") and int(c) % 2)) % len(names)]
        for state, c in zip(homes["state"], county, strict=True)
    ]
    for site in names:
        homes.filter(pl.Series(at) == site).write_parquet(deployment.folder / f"{site}.parquet")
        deployment.start_node(site)


def radon(homes, sites):
    states = [state for site in sites for state in STATES[site]]
    return homes.filter(homes["state"].is_in(states)).with_columns(high=pl.col("radon") > 4)


def agree(deployment, homes, sites, settings, out):
    """Clusters at the operator and clients at every site are those of the fit in memory; clients are at their own site only."""
    kept = ("client", "cluster", "gamma", "lam", "formula", "family", "solver", "max_iter", "tol", "options")
    whole = fit_table(homes, Spec(**{name: value for name, value in settings.items() if name in kept}))
    operators = load_model(deployment.folder / out)[0]
    np.testing.assert_allclose(operators.wbar, whole.wbar, rtol=0, atol=1e-10)
    np.testing.assert_allclose(operators.w, whole.w, rtol=0, atol=1e-10)
    theta = dict(zip(whole.hierarchy.client_ids.to_list(), whole.theta, strict=True))
    assert operators.hierarchy.n_clients == 0
    seen = []
    for site in sites:
        model = load_model(deployment.folder / site / "model")[0]
        ids = model.hierarchy.client_ids.to_list()
        assert set(ids) == set(pl.read_parquet(deployment.folder / f"{site}.parquet")["county"])
        np.testing.assert_allclose(model.theta, [theta[each] for each in ids], rtol=0, atol=1e-10)
        seen += ids
    assert sorted(seen) == sorted(theta)


@pytest.mark.federation
@pytest.mark.filterwarnings("ignore::covey.errors.ConvergenceWarning")
def test_other_sites_do_not_wait_for_a_slow_one(tmp_path, homes):
    """One site answers about ten times slower. By the audit logs, the sites of other clusters get message after message."""
    sites, slow = ["north", "south", "west"], 5.0
    homes = radon(homes, sites)
    known = {"p0": 1e-9, "p": 0.3, "L": 1e4, "mu": 1e-3, "every": 40}
    settings = {**SETTINGS, "formula": "log_radon ~ floor", "solver": "l2gd", "max_iter": 40, "tol": 1e-300, "options": known}
    with deployed(tmp_path, changed="slow") as deployment:
        deployment.environment["SLOW"] = str(slow)
        deployment.register(*sites)
        for site in sites:
            homes.filter(homes["state"].is_in(STATES[site])).write_parquet(deployment.folder / f"{site}.parquet")
            deployment.start_node(site, solvers=["gradient"])
        code, _, err = deployment.run({**settings, "sites": ",".join(sites), "out": "fit"}, wait=150)
        assert code == 0, err + deployment.log("west")
        agree(deployment, homes, sites, settings, "fit")
        lines = {site: [line for line in deployment.audit(site) if "l2gd move" in line.get("kind", "")] for site in sites}
    at = {site: [datetime.fromisoformat(line["time"]).timestamp() for line in found] for site, found in lines.items()}
    waits = {site: np.diff(times) for site, times in at.items()}
    print(
        {
            site: (len(wait) + 1, wait.max().round(2), times[-1] - times[0])
            for (site, wait), times in zip(waits.items(), at.values(), strict=True)
        }
    )
    assert min(map(len, at.values())) >= 5
    assert waits["west"].min() >= slow
    for site in ("north", "south"):
        assert waits[site].max() < slow
        assert at[site][-1] - at[site][0] < (at["west"][-1] - at["west"][0]) / 2


def test_two_sites_fit_as_in_memory(tmp_path, homes):
    sites = ["north", "south"]
    homes = radon(homes, sites)
    with deployed(tmp_path) as deployment:
        start_sites(deployment, homes, sites)
        settings = {**SETTINGS, **FAMILIES["sweep"]}
        began = time.monotonic()
        code, out, err = deployment.run({**settings, "sites": "north,south", "out": "fit"})
        print(out, err, f"seconds from flwr run to its end: {time.monotonic() - began:.1f}")
        assert code == 0, err
        agree(deployment, homes, sites, settings, "fit")
        assert "Apache, AZ" not in deployment.log("link") + out + err


@pytest.fixture(scope="module")
def four(tmp_path_factory, homes):
    with deployed(tmp_path_factory.mktemp("four")) as deployment:
        start_sites(deployment, radon(homes, STATES), STATES)
        yield deployment


@pytest.mark.federation
@pytest.mark.parametrize("solver", FAMILIES)
def test_four_sites_fit_as_in_memory(four, homes, solver):
    settings = {**SETTINGS, **FAMILIES[solver]}
    began = time.monotonic()
    code, out, err = four.run({**settings, "sites": 4, "out": solver})
    seconds = time.monotonic() - began
    print(out, f"seconds from flwr run to its end: {seconds:.1f}")
    assert code == 0, err
    assert seconds < 180
    agree(four, radon(homes, STATES), STATES, settings, solver)


@pytest.mark.federation
def test_a_killed_coordinator_goes_on_where_it_was(four, homes):
    settings = {**SETTINGS, **FAMILIES["newton"]}
    run, journal = four.start_run({**settings, "sites": 4, "out": "again"}), four.folder / "again.journal"
    until(lambda: journal.exists() and journal.read_bytes().count(b"\n") >= 5, 300, 0.02)  # its head and four messages
    (pid,) = four.marked("flwr-serverapp")
    os.kill(pid, signal.SIGKILL)
    run.communicate(timeout=200)
    assert run.returncode == 2
    code, _, err = four.run({**settings, "sites": 4, "out": "again"})
    assert code == 0, err
    assert min(map(int, re.findall(r"covey: message (\d+) ", err))) >= 5
    agree(four, radon(homes, STATES), STATES, settings, "again")


def kill_at_next_step(deployment, site):
    """Kill a node that has just answered one more step of Newton's method, by its audit log: more steps will follow."""
    log, step = deployment.folder / site / "audit.jsonl", b'"kind": "newton step"'
    before = log.read_bytes().count(step) if log.exists() else 0
    until(lambda: log.exists() and log.read_bytes().count(step) > before, 300, 0.02)
    deployment.kill(site)


@pytest.mark.federation
def test_a_node_that_is_killed_in_an_exchange(tmp_path, homes):
    """Started again, it goes on from its own disk to the fit in memory; if it stays away, the run goes on without it."""
    sites = ["north", "south"]
    homes = radon(homes, sites)
    with deployed(tmp_path) as deployment:
        start_sites(deployment, homes, sites)
        settings = {**SETTINGS, **FAMILIES["newton"], "sites": "north,south"}
        run = deployment.start_run({**settings, "out": "fit", "retries": 5, "pause": 20.0})
        kill_at_next_step(deployment, "south")
        deployment.start_node("south")
        out, err = run.communicate(timeout=300)
        assert run.returncode == 0, err
        assert ", again to 1" in err
        assert "Without" not in out
        agree(deployment, homes, sites, settings, "fit")

        run = deployment.start_run({**settings, "out": "without", "retries": 0, "on_loss": "continue"})
        kill_at_next_step(deployment, "south")
        out, err = run.communicate(timeout=300)
        assert run.returncode == 0, err
        assert re.search(r"Without south \(its node has stopped.*\): its clients are in no sum of this fit", out), out
        left = homes.filter(homes["county"].is_in(pl.read_parquet(tmp_path / "north.parquet")["county"].to_list()))
        agree(deployment, left, ["north"], settings, "without")


@pytest.mark.federation
def test_replayed_messages_change_nothing(tmp_path, homes):
    """The same message again gets the same bytes; one from before is refused as stale; the fit is the one in memory."""
    sites = ["north", "south"]
    homes = radon(homes, sites)
    with deployed(tmp_path, changed="replaying") as deployment:
        start_sites(deployment, homes, sites)
        settings = {**SETTINGS, **FAMILIES["sweep"]}
        code, _, err = deployment.run({**settings, "sites": "north,south", "out": "fit"})
        assert code == 0, err
        kinds = ["hello", "agree", "ask", "ask", "deliver"]
        assert [line for line in err.splitlines() if " again: " in line] == [
            f"covey: {kind} again: the same bytes" for kind in kinds
        ]
        stale = [line for line in err.splitlines() if "the message before" in line]
        assert stale == [
            "covey: the message before agree: reply",  # a hello is answered whenever it comes
            "covey: the message before ask: refusal stale",
            "covey: the message before ask: refusal stale",
            "covey: the message before deliver: refusal stale",
        ]
        agree(deployment, homes, sites, settings, "fit")


@pytest.mark.federation
def test_status_says_which_sites_answer(tmp_path, homes):
    """Also in its exit code; what a site says of itself names no column."""
    with deployed(tmp_path) as deployment:
        deployment.register("north", "south")
        radon(homes, ["north"]).write_parquet(tmp_path / "north.parquet")
        deployment.start_node("north", minimum=7)
        until(lambda: "connected to" in deployment.log("north"), 90)
        found = json.loads(deployment.command("covey status --link link --json", code=1, patience=240))
        assert found["north"]["state"] == "online"
        assert found["north"]["covey"] == __version__
        assert (found["north"]["minimum"], found["north"]["approve"]) == (7, "policy")
        (other,) = (about for name, about in found.items() if name != "north")
        assert other["state"] == "registered"
        assert "covey" not in other
        assert "log_radon" not in json.dumps(found)
