"""The clock: random schedules and speeds, an event-by-event simulation, and the errors of a table of speeds."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from covey import Spec, fit, plan, simulate_sites
from covey.datasets import simulate
from covey.errors import DataError, SolverError
from covey.objective.theory import Probabilities, best_tau
from covey.solvers.clock import MODES, Durations, Speeds, by_iteration, check_seconds, seconds, timeline, timeline_of
from covey.solvers.first_order.schedule import Choices, Rounds, Schedule, group
from tests.federation.sites import table as table_of

times = st.floats(0.0, 10.0)


def lists(values, k):
    return st.lists(values, min_size=k, max_size=k)


tables = st.integers(1, 6).flatmap(lambda k: st.tuples(*(lists(times, k) for _ in range(4)), lists(st.floats(0, 0.9), k)))


def schedule_of(p0, p, rho, seed, merge):
    p = np.array(p)
    return Schedule(Probabilities(p0, p, best_tau(p0, p), rho), seed, merge)


@settings(max_examples=200)
@given(table=tables, p0=st.floats(0, 0.6), rho=st.sampled_from([0.0, 0.2]), seed=st.integers(0, 99), merge=st.booleans())
def test_asynchronous_is_never_later(table, p0, rho, seed, merge):
    """On any table of speeds, and for any schedule: neither than rounds nor than lock-step. The work is the same."""
    *lasts, p = table
    durations, schedule = Durations(*map(np.array, lasts)), schedule_of(p0, p, rho, seed, merge)
    found = {mode: timeline_of(schedule, 40, durations, mode) for mode in MODES}
    for mode in ("lock-step", "rounds"):
        assert found["asynchronous"].seconds <= found[mode].seconds * (1 + 1e-12) + 1e-12
    for mode, each in found.items():
        assert seconds(schedule, 0, 40, durations, mode) == pytest.approx(each.seconds)
    for kind in ("computing", "sending"):
        done = [getattr(each, kind).sum(axis=0) for each in found.values()]
        np.testing.assert_allclose(done[0], done[2], rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(done[1], done[2], rtol=1e-9, atol=1e-9)


@settings(max_examples=200)
@given(table=tables, p0=st.floats(0.05, 0.6), seed=st.integers(0, 99), merge=st.booleans())
def test_with_one_schedule_for_all_clusters_rounds_are_never_later_than_lock_step(table, p0, seed, merge):
    """If clusters exchange only all together (one_coin, proxskip), a round is a stretch of iterations of all clusters."""
    *lasts, p = table
    schedule = schedule_of(p0, np.zeros(len(p)), 0.1, seed, merge)
    durations = Durations(*map(np.array, lasts))
    slow, rounds, free = (timeline_of(schedule, 40, durations, mode).seconds for mode in MODES)
    assert free <= rounds * (1 + 1e-12) + 1e-12
    assert rounds <= slow * (1 + 1e-12) + 1e-12


@settings(max_examples=200)
@given(table=tables, p0=st.floats(0, 0.6), rho=st.sampled_from([0.0, 0.2]), seed=st.integers(0, 99), merge=st.booleans())
def test_rounds_take_at_most_the_number_of_clusters_times_as_long(table, p0, rho, seed, merge):
    """As asynchronous, and so as lock-step: between two exchanges between clusters each round is some cluster's work."""
    *lasts, p = table
    durations, schedule = Durations(*map(np.array, lasts)), schedule_of(p0, p, rho, seed, merge)
    _, rounds, free = (timeline_of(schedule, 40, durations, mode).seconds for mode in MODES)
    assert rounds <= len(p) * free * (1 + 1e-12) + 1e-12


@pytest.mark.parametrize("k", [2, 5, 20])
def test_that_factor_is_attained(k):
    """In each round another cluster has 100 local steps before its exchange; the others have none."""
    within, nothing = np.zeros((100 + k, k), dtype=bool), np.zeros(100 + k, dtype=bool)
    for j in range(k):
        within[:j, j] = within[j + 100 :, j] = True
    durations, choices = Durations(np.ones(k), *np.zeros((3, k))), Choices(nothing, within, nothing)
    rounds, free = (timeline(group(choices), durations, barriers=barriers).seconds for barriers in (True, False))
    assert (rounds, free) == (100 * k, 100)


def windows(choices):
    """A round for every iteration in which some cluster exchanges; all clusters take their local steps before it."""
    one = by_iteration(choices, False)
    ends = (one.between > 0) | one.within.any(axis=1) | one.refresh
    first = np.flatnonzero(np.concatenate([[True], ends[:-1]]))
    steps, between, within, refresh = (
        np.add.reduceat(part, first) for part in (one.steps, one.between, one.within, one.refresh)
    )
    return Rounds(one.start[first], steps, between, within, refresh.astype(bool))


@settings(max_examples=200)
@given(table=tables, p0=st.floats(0, 0.6), rho=st.sampled_from([0.0, 0.2]), seed=st.integers(0, 99))
def test_a_round_for_every_exchange_is_never_later_than_lock_step(table, p0, rho, seed):
    """docs/explanation/asynchrony.md proves that no rounds with fewer messages have this for all speeds."""
    *lasts, p = table
    durations, choices = Durations(*map(np.array, lasts)), schedule_of(p0, p, rho, seed, False).choices(0, 40)
    found = [timeline(each, durations, barriers=True) for each in (windows(choices), by_iteration(choices, False))]
    assert found[0].seconds <= found[1].seconds * (1 + 1e-12) + 1e-12
    np.testing.assert_allclose(found[0].computing.sum(axis=0), found[1].computing.sum(axis=0), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(found[0].sending.sum(axis=0), found[1].sending.sum(axis=0), rtol=1e-9, atol=1e-9)


@settings(max_examples=200)
@given(k=st.integers(2, 6), p0=st.floats(0, 0.6), seed=st.integers(0, 99), data=st.data())
def test_rounds_that_part_an_iteration_are_later_than_lock_step_for_some_speeds(k, p0, seed, data):
    """The proof in docs/explanation/asynchrony.md, with its speeds: iteration t is in a later round in j than in i."""
    schedule, T = schedule_of(p0, data.draw(lists(st.floats(0, 0.9), k)), 0.0, seed, False), 40
    choices = schedule.choices(0, T)
    rounds, place = group(choices, 0, False), np.zeros((T, k), dtype=int)
    for r, j in np.ndindex(*rounds.steps.shape):
        end = rounds.start[r, j] + rounds.steps[r, j] + (rounds.within[r, j] > 0 or rounds.between[r] > 0)
        place[rounds.start[r, j] : end, j] = r
    parted = np.flatnonzero(np.ptp(place, axis=1))
    assume(len(parted))
    t = int(data.draw(st.sampled_from(parted.tolist())))
    own = np.isin(np.arange(k), [place[t].argmin(), place[t].argmax()]) * 1.0
    durations = Durations(own, own, own / 2, own / 2)
    later, slow = (timeline(each, durations, barriers=True).seconds for each in (rounds, by_iteration(choices, False)))
    assert slow == T + choices.between.sum()
    assert later >= slow + 1


def test_rounds_can_be_later_than_lock_step():
    """Cluster 1 exchanges first and cluster 0 last. Each round waits for another cluster's ten local steps."""
    within = np.zeros((11, 2), dtype=bool)
    within[0, 1] = within[10, 0] = within[10, 1] = True
    choices = Choices(np.zeros(11, dtype=bool), within, np.zeros(11, dtype=bool))
    durations = Durations(np.ones(2), np.zeros(2), np.zeros(2), np.zeros(2))
    lock_step = timeline(by_iteration(choices, False), durations, barriers=True).seconds
    rounds, free = (timeline(group(choices), durations, barriers=barriers).seconds for barriers in (True, False))
    assert (lock_step, rounds, free) == (10, 19, 10)


@pytest.mark.parametrize("merge", [False, True])
def test_it_is_the_run_written_out(merge):
    """One iteration after the other, each cluster with its own clock; no rounds are used."""
    rng = np.random.default_rng(4)
    k, T = 4, 300
    schedule = schedule_of(0.1, rng.uniform(0, 0.5, size=k), 0.05, 3, merge)
    durations, choices = Durations(*rng.uniform(0.1, 2, size=(4, k))), schedule.choices(0, T)
    now, current, in_run = np.zeros(k), np.zeros(k, dtype=bool), False
    for t in range(T):
        if choices.between[t]:
            if not (merge and in_run):
                now = (now + 2 * durations.up).max() + 2 * durations.down
            current[:] = True
        else:
            for j in range(k):
                if not choices.within[t, j]:
                    now[j] += durations.step[j]
                elif not (merge and current[j]):
                    now[j] += durations.up[j] + durations.down[j]
                current[j] = choices.within[t, j]
        in_run = choices.between[t]
        if choices.refresh[t]:
            now = (now + durations.refresh + 2 * durations.up).max() + 2 * durations.down
            current[:], in_run = False, False
    found = timeline_of(schedule, T, durations, "asynchronous")
    assert found.seconds == pytest.approx(now.max())
    assert seconds(schedule, 0, T, durations, "asynchronous") == pytest.approx(found.seconds)
    parts = found.frame
    for j in range(k):  # no two activities of a cluster overlap, and there are no gaps
        own = parts.filter(pl.col("cluster") == j)
        np.testing.assert_allclose(own["end"][:-1], own["start"][1:], atol=1e-9)
    assert parts["end"].max() == pytest.approx(found.seconds)


@pytest.mark.filterwarnings("ignore::covey.errors.ConvergenceWarning")
@pytest.mark.parametrize("solver", ["l2gd", "al2sgd_plus", "proxskip"])
def test_a_run_on_a_clock(solver, tmp_path):
    """In memory and across sites: the same times, from the random choices that the run had, check after check."""
    frame = table_of(1)
    asked = {"solver": solver, "max_iter": 60, "tol": 1e-300, "options": {"every": 20}, "gamma": 2.0, "lam": 1.5}
    spec = Spec(formula="y ~ x", client="client", cluster="cluster", **asked)
    model = fit(frame, spec)
    slow = pl.DataFrame({"cluster": ["b"], "rows_per_second": [50.0], "latency": [0.3]})
    clock = model.clock(slow)
    times = clock.frame
    assert times["iteration"].to_list() == model.history_["iteration"].to_list() == [0, 20, 40, 60]
    assert (times["asynchronous"] <= times["lock_step"] * (1 + 1e-12)).all()
    assert (times["asynchronous"] <= times["rounds"] * (1 + 1e-12)).all()
    assert times["asynchronous"].is_sorted()
    course, lasts = model.model_.course, clock.durations
    last = sum(seconds(course.schedule, at, at + 20, lasts, "rounds") for at in (0, 20, 40)) + 4 * check_seconds(lasts)
    assert times["rounds"][-1] == pytest.approx(last)
    across = simulate_sites(frame, spec, sites=3).clock(slow)
    assert across.frame.equals(times)  # all clients have as many rows as the mean, which is all that an operator knows
    assert clock.timelines(50)["asynchronous"].seconds <= clock.timelines(50)["lock-step"].seconds
    assert str(clock).startswith("on a clock, 60 iterations with checks take: asynchronous ")


def test_only_runs_with_random_choices_have_a_clock(tmp_path):
    model = fit(table_of(1), Spec(formula="y ~ x", client="client", cluster="cluster", gamma=2.0, lam=1.5))
    with pytest.raises(SolverError, match="run of 'sweep' has no clock"):
        model.clock()


def test_a_slow_cluster_in_the_plan():
    data = simulate(clusters=3, clients=4, rows=20, d=2, cluster_sd=0.4, client_sd=0.3, seed=4).data
    slow = pl.DataFrame({"cluster": [1], "rows_per_second": [1e3], "latency": [0.5]})
    fast, found = (plan(data, gamma=3.0, speeds=table) for table in (None, slow))
    for before, after in zip(fast.costs, found.costs, strict=True):
        assert after.seconds > before.seconds
        assert after.seconds <= after.lock_step * (1 + 1e-9)
    assert "latency 50 to 500 ms" in str(found)
    assert "lock-step" in str(found)
    assert set(found.frame.columns) >= {"seconds", "rounds", "lock_step"}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"latency": [1.0]}, "no column 'cluster'"),
        ({"cluster": [0], "speed": [1.0]}, "column 'speed'"),
        ({"cluster": [7], "latency": [1.0]}, "cluster '7', which the data do not have"),
        ({"cluster": [1, 1], "latency": [1.0, 2.0]}, "cluster '1' twice"),
        ({"cluster": [1], "bandwidth": [0.0]}, r"bandwidth of cluster 1 must be a number above 0. Got 0.0"),
        ({"cluster": [1], "latency": [None]}, r"latency of cluster 1 must be a number at least 0. Got None"),
    ],
)
def test_mistakes_in_a_table_of_speeds(table, message):
    tree = simulate(clusters=3, clients=2, rows=3, d=1, seed=1).data.hierarchy
    with pytest.raises(DataError, match=message):
        Speeds.of(tree, pl.DataFrame(table))
