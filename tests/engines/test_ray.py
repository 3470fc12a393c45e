"""Shards on several Ray nodes of this machine: the bits of shards in one process, also if actors or nodes are lost.

``make test-engines`` runs these tests in an environment that has Ray.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np
import polars as pl
import pytest

import covey
from covey import CoveyError, Spec
from covey.engines.ray import MOST_DEATHS, SAVE_EVERY, Log, actors
from covey.fitting.fit import fit
from covey.losses import from_functions
from covey.nodes.layout import lay_out, parts_of
from covey.nodes.requests import PutSnapshot, TakeSnapshot
from covey.nodes.shards import Shards, open_shards
from covey.problem.problem import resolve
from covey.records import decode
from tests.cli.shell import inside
from tests.nodes.test_shards import MODELS, counts_of

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("ignore::covey.errors.ConvergenceWarning")]

SOLVERS = [
    Spec(formula="y ~ x", client="client", cluster="cluster", gamma=2.0, solver=solver, max_iter=steps)
    for solver, steps in (("proxskip", 30), ("l2gd", 100), ("one_coin", 100))
]


@pytest.fixture(scope="module")
def cluster():
    """Three Ray nodes; this process is connected to them."""
    os.environ["RAY_AUTH_MODE"] = "disabled"  # else Ray writes a token into the home folder
    import ray
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for _ in range(2):
        nodes.add_node(num_cpus=1)
    ray.init(address=nodes.address, log_to_driver=False)
    yield nodes
    ray.shutdown()
    nodes.shutdown()


@pytest.fixture
def rows(tmp_path):
    """A table and its shards."""
    table = counts_of(0)
    return table, lay_out(table.lazy(), tmp_path / "shards", "client", 3)


def assert_same_bits(one, two):
    assert np.array_equal(one.theta, two.theta)
    assert np.array_equal(one.w, two.w)
    assert np.array_equal(one.wbar, two.wbar)
    assert np.array_equal(one.rows, two.rows)
    assert one.convergence == two.convergence
    assert (one.learned is None) == (two.learned is None)
    if one.learned is not None:
        assert one.learned.components.log_likelihood == two.learned.components.log_likelihood
        assert np.array_equal(one.learned.units.C, two.learned.units.C)
        assert np.array_equal(one.learned.covariance, two.learned.covariance)


def fit_here(folder, spec):
    with open_shards(folder, resolve(spec)) as (network, problem):
        return fit(network, problem)


def fit_on_ray(folder, spec, disturb=lambda holder: None):
    """A fit on the cluster, and the number of actors that died; ``disturb`` gets the actors after they have opened rows."""
    draft = resolve(spec)
    with actors(folder, draft) as holder:
        network, problem = Shards.open(holder, folder, draft)
        disturb(holder)
        return fit(network, problem), sum(holder.deaths)


def at_message(count, holder, act):
    """Do something before the message of this number."""
    ask, asked = holder.ask, iter(range(1, 1_000_000))

    def counted(what):
        if next(asked) == count:
            act()
        return ask(what)

    holder.ask = counted


def kill(holder, shard):
    """Kill the actor of a shard, and wait until Ray knows that it is dead."""
    import ray

    ray.kill(holder.alive[shard])
    with suppress(ray.exceptions.RayActorError):
        while True:
            ray.get(holder.alive[shard].about.remote())


KILLED = [(0, 2), (0, SAVE_EVERY + 20), (5, 30), (3, 4), (7, 30), (8, 3)]
"""Models, and the message before which an actor dies."""


@pytest.mark.parametrize("at", sorted(set(range(len(MODELS))) - {at for at, _ in KILLED}))
def test_every_model_has_the_bits_of_shards_in_this_process(cluster, rows, at):
    """The others are in the test of actors that are killed."""
    table, folder = rows
    spec = MODELS[at]
    if isinstance(spec.gamma, dict):
        spec = replace(spec, gamma={client: 1.0 + client for client in table["client"].unique()})
    assert_same_bits(fit_here(folder, spec), fit_on_ray(folder, spec)[0])


@pytest.mark.parametrize("spec", SOLVERS, ids=lambda spec: spec.solver)
def test_every_solver(cluster, rows, spec):
    assert_same_bits(fit_here(rows[1], spec), fit_on_ray(rows[1], spec)[0])


@pytest.mark.parametrize(("at", "message"), KILLED)
def test_an_actor_that_is_killed_during_a_fit(cluster, rows, at, message):
    spec = MODELS[at]
    found, deaths = fit_on_ray(rows[1], spec, lambda holder: at_message(message, holder, partial(kill, holder, 1)))
    assert deaths == 1
    assert_same_bits(fit_here(rows[1], spec), found)


def test_an_actor_that_is_killed_while_it_works_and_again(cluster, rows):
    """The actor dies between a message and its reply, and its successor dies too."""

    def disturb(holder):
        call, calls = holder._call, iter(range(1, 1_000_000))

        def killing(at, method, *arguments):
            sent = call(at, method, *arguments)
            if at == 2 and next(calls) in (5, 30):
                kill(holder, 2)
            return sent

        holder._call = killing

    found, deaths = fit_on_ray(rows[1], MODELS[6], disturb)
    assert deaths >= 2
    assert_same_bits(fit_here(rows[1], MODELS[6]), found)


def test_two_actors_that_are_killed_at_once(cluster, rows):
    """Both are replaced, while the third one answers."""

    def both(holder):
        kill(holder, 0)
        kill(holder, 2)

    found, deaths = fit_on_ray(rows[1], MODELS[6], lambda holder: at_message(12, holder, partial(both, holder)))
    assert deaths == 2
    assert_same_bits(fit_here(rows[1], MODELS[6]), found)


def test_a_reply_that_is_lost(cluster, rows, monkeypatch):
    """As when a machine is gone before its reply is fetched: the actor has moved on, so another one takes its place."""
    import ray

    get, lost = ray.get, []

    def losing(call, *more, **given):
        found = get(call, *more, **given)
        if len(lost) < 2:
            lost.append(call)
            raise ray.exceptions.ObjectLostError(call.hex(), None, "")
        return found

    found, deaths = fit_on_ray(rows[1], MODELS[7], lambda holder: monkeypatch.setattr(ray, "get", losing))
    assert (deaths, len(lost)) == (2, 2)
    assert_same_bits(fit_here(rows[1], MODELS[7]), found)


def test_replies_are_read_as_they_arrive(cluster, rows):
    """The first shard is slow. Before it answers, the reply of the third is read and the second, which died, is replaced."""
    draft, seen = resolve(MODELS[6]), []
    with actors(rows[1], draft) as holder:
        network, problem = Shards.open(holder, rows[1], draft)
        noted, start = holder._noted, holder.start
        holder._noted = lambda at, *more: (seen.append(at), noted(at, *more))[1]
        holder.start = lambda part: (seen.append(part), start(part))[1]
        holder.alive[0].__ray_call__.remote(lambda self: time.sleep(3.0))
        kill(holder, 1)
        assert len(network.every(TakeSnapshot())) == 3
        assert set(seen[: seen.index(0)]) >= {2, holder.parts[1]}
        assert_same_bits(fit_here(rows[1], MODELS[6]), fit(network, problem))


def test_a_node_that_is_removed_during_a_fit(cluster, tmp_path):
    folder, spec = lay_out(counts_of(1).lazy(), tmp_path / "shards", "client", 6), MODELS[6]
    node = cluster.add_node(num_cpus=1)
    found, deaths = fit_on_ray(folder, spec, lambda holder: at_message(10, holder, partial(cluster.remove_node, node, False)))
    assert deaths >= 1
    assert_same_bits(fit_here(folder, spec), found)


def test_the_log_is_shortened(cluster, rows):
    kept = list[Log]()
    fit_on_ray(rows[1], MODELS[5], lambda holder: kept.extend(holder.logs))
    assert len(kept) == 3
    assert max(len(log.since) for log in kept) <= SAVE_EVERY
    assert all(isinstance(decode(log.since[0]), PutSnapshot) for log in kept)


@pytest.mark.parametrize(("at", "solver", "few", "many"), [(3, "newton", 2, 40), (7, "al2sgd_plus", 100, 200)])
def test_a_checkpoint_resumes_on_other_actors(cluster, rows, at, solver, few, many):
    file = str(rows[1].parent / "run")
    for steps in (few, many):
        spec = replace(MODELS[at], solver=solver, max_iter=steps, options={"checkpoint": file})
        found = covey.fit(rows[1], spec, engine="ray")
    whole = covey.fit(rows[1], replace(spec, options=None))
    assert np.array_equal(found.coef_, whole.coef_)


def test_a_loss_of_the_user(cluster, rows):
    huber = from_functions(
        "huber_on_ray",
        value=lambda m, y: np.where(abs(m - y) < 1, 0.5 * (m - y) ** 2, abs(m - y) - 0.5),
        slope=lambda m, y: np.clip(m - y, -1, 1),
        curvature=lambda m, y: (abs(m - y) < 1).astype(float),
        bounds=(0.0, 1.0),
        start=lambda y: y,
    )
    spec = Spec(formula="y ~ x", family=huber.name, client="client", gamma=1.0)
    assert_same_bits(fit_here(rows[1], spec), fit_on_ray(rows[1], spec)[0])


def test_intervals_predictions_and_a_saved_model(cluster, rows, tmp_path):
    table, folder = rows
    here, there = covey.fit(folder, MODELS[0]), covey.fit(folder, MODELS[0], engine="ray")
    assert there.coef_frame("client").equals(here.coef_frame("client"))
    assert np.array_equal(covey.load(there.save(tmp_path / "model")).predict(table), here.predict(table))


def test_mistakes(cluster, rows, tmp_path, monkeypatch):
    table, folder = rows
    spoiled = table.with_columns(x=pl.when(pl.col("client") == 5).then(float("inf")).otherwise(pl.col("x")))
    bad = lay_out(spoiled.lazy(), tmp_path / "bad", "client", 3)
    with pytest.raises(covey.CoveyError, match=r"'x' is infinite.*client 5.*shard=") as here:
        covey.fit(bad, MODELS[4])
    with pytest.raises(type(here.value)) as there:
        covey.fit(bad, MODELS[4], engine="ray")
    assert str(there.value) == str(here.value)
    for file in parts_of(bad)[1].glob("*.parquet"):  # as on a machine that does not share the folder
        file.unlink()
    with pytest.raises(CoveyError, match=r"machine '.+' cannot read '.*shard=.*'; put the shards into a folder that all"):
        covey.fit(bad, MODELS[4], engine="ray")
    monkeypatch.setattr("covey.engines.ray.__version__", "0.0.1")
    with pytest.raises(CoveyError, match=r"has covey .*, and this one has 0.0.1; install the same version"):
        covey.fit(folder, MODELS[4], engine="ray")


def test_an_actor_that_always_dies(cluster, rows):
    def disturb(holder):
        start = holder.start

        def doomed(part):
            actor = start(part)
            holder.alive[0] = actor
            kill(holder, 0)
            return actor

        holder.start = doomed
        kill(holder, 0)

    with pytest.raises(CoveyError, match=rf"shard=\d+ has died {MOST_DEATHS} times in a row .*smaller shards"):
        fit_on_ray(rows[1], MODELS[0], disturb)


def test_the_command_line(cluster, rows):
    command = ["fit", "shards", "y ~ x", "--client", "client", "--gamma", "2", "--json"]
    here, there = (
        inside(*command, *more, cwd=rows[1].parent) for more in ([], ["--engine", "ray", "--address", cluster.address])
    )
    assert there.stdout == here.stdout


def test_a_cluster_that_is_not_there(rows):
    """In a process that is not connected to a cluster."""
    command = [sys.executable, "-m", "covey", "fit", str(rows[1]), "y ~ x", "--client", "client", "--gamma", "2"]
    command += ["--engine", "ray", "--address", "127.0.0.1:9"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "RAY_AUTH_MODE": "disabled"})
    assert done.returncode == 2
    assert "The Ray cluster at '127.0.0.1:9' cannot be reached" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_cluster_one_is_started_here(rows):
    code = f"import covey; print(covey.fit({str(rows[1])!r}, covey.{MODELS[8]!r}, engine='ray').global_coef_.tolist())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
    )
    assert done.stdout.strip() == str(covey.fit(rows[1], MODELS[8]).global_coef_.tolist())
