"""A clock for runs over clusters of different speed: when each cluster computes, sends and waits.

Clients of a cluster work at the same time, and clusters share no resource. In an exchange within a cluster every client sends a
message up to the cluster's server and gets one down. In an exchange between clusters each server also sends one message up to
the centre and gets one down; it needs the messages of all clusters that take part. The random choices of a run
(:mod:`.schedule`) fix what is computed and sent. Three modes differ in who waits for whom:

    lock-step       every cluster waits for all others after every iteration
    rounds          after every round; round r ends with the r-th exchange within each cluster since one between clusters
    asynchronous    only at an exchange between clusters

The coefficients are the same bits in all modes. Asynchronous is never later than the others. Rounds are usually earlier than
lock-step, but not always: a round waits for the cluster with the most local steps before its exchange, and in each round that
may be another cluster (tests/solvers/test_clock.py has an example). With ``k`` clusters they take at most ``k`` times as
long as asynchronous; docs/explanation/asynchrony.md has the proofs.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import polars as pl

from covey._typing import Anything, Floats, Ints
from covey.errors import DataError, SolverError, listing, number, one_of
from covey.solvers.first_order.schedule import Choices, Rounds, Schedule, group
from covey.solvers.ledger import Course, Links
from covey.tree.hierarchy import Hierarchy

LATENCY = 0.05
BANDWIDTH = 10.0
ROWS_PER_SECOND = 1e6

Mode = Literal["lock-step", "rounds", "asynchronous"]
MODES: tuple[Mode, ...] = ("lock-step", "rounds", "asynchronous")

_LONG = 200_000  # iterations, times clusters, of a run for averages


@dataclass(frozen=True)
class Speeds:
    """How fast the clusters compute and send, ``(k,)`` each.

    Attributes
    ----------
    rows_per_second : rows whose gradient a client computes in a second
    latency : seconds of a message, one way
    bandwidth : megabytes per second of each connection
    """

    rows_per_second: Floats
    latency: Floats
    bandwidth: Floats

    @classmethod
    def of(
        cls,
        tree: Hierarchy,
        table: pl.DataFrame | None = None,
        *,
        rows_per_second: float = ROWS_PER_SECOND,
        latency: float = LATENCY,
        bandwidth: float = BANDWIDTH,
    ) -> Speeds:
        """The same speed for all clusters, except where ``table`` has another.

        Parameters
        ----------
        tree : Hierarchy
            The clusters.
        table : polars.DataFrame, optional
            A column ``cluster`` with ids, and one or more of ``rows_per_second``, ``latency`` and ``bandwidth``.
        rows_per_second, latency, bandwidth : float
            For clusters, and columns, that are not in the table.

        Returns
        -------
        Speeds

        Examples
        --------
        >>> from covey import GroupedData
        >>> tree = GroupedData.from_arrays([[1.0]] * 3, [0.0] * 3, ["a", "b", "c"], ["x", "x", "y"]).hierarchy
        >>> Speeds.of(tree, pl.DataFrame({"cluster": ["y"], "latency": [2.0]})).latency.tolist()
        [0.05, 2.0]
        """
        number("rows_per_second", rows_per_second, above=0.0)
        number("latency", latency, least=0.0)
        number("bandwidth", bandwidth, above=0.0)
        k = tree.n_clusters
        default = {"rows_per_second": rows_per_second, "latency": latency, "bandwidth": bandwidth}
        speeds = {name: np.full(k, float(value)) for name, value in default.items()}
        if table is not None:
            place = _places(tree, table, tuple(default))
            for name in set(table.columns) - {"cluster"}:
                speeds[name][place] = [_entry(table, name, row) for row in range(len(table))]
        return cls(**speeds)

    def message(self, numbers: float) -> Floats:
        """Seconds of a message of that many numbers, one way, ``(k,)``."""
        return self.latency + 8 * numbers / (1e6 * self.bandwidth)

    def work(self, rows: Any) -> Floats:
        """Seconds for the gradients of ``rows`` rows, a number or ``(k,)``."""
        return np.asarray(rows / self.rows_per_second)


def _places(tree: Hierarchy, table: pl.DataFrame, columns: tuple[str, ...]) -> Ints:
    """The cluster of each row of a table of speeds."""
    if "cluster" not in table.columns:
        raise DataError(f"The table of speeds has no column 'cluster'; it has {listing(table.columns, 10)}.")
    for name in table.columns:
        if name != "cluster" and name not in columns:
            raise DataError(f"The table of speeds has a column {name!r}; it may have 'cluster', {listing(columns, 5)}.")
    known = {str(label): j for j, label in enumerate(tree.cluster_ids.to_list())}
    names = [str(label) for label in table["cluster"].to_list()]
    unknown = [name for name in names if name not in known]
    if unknown:
        some = listing(list(known), 5)
        raise DataError(f"The table of speeds has the cluster {unknown[0]!r}, which the data do not have; they have {some}.")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"The table of speeds has the cluster {twice!r} twice; leave one row.")
    return np.array([known[name] for name in names], dtype=np.int64)


def _entry(table: pl.DataFrame, name: str, row: int) -> float:
    value = table[name][row]
    try:
        return number(name, value, least=0.0) if name == "latency" else number(name, value, above=0.0)
    except SolverError:
        bound = "at least 0" if name == "latency" else "above 0"
        cluster = table["cluster"][row]
        raise DataError(f"The {name} of cluster {cluster!r} must be a number {bound}. Got {value!r} instead.") from None


@dataclass(frozen=True)
class Durations:
    """Seconds of the parts of a run in each cluster, ``(k,)`` each.

    Attributes
    ----------
    step : a local step
    refresh : the full gradient at a new anchor
    up, down : a message to the server, and one from it
    """

    step: Floats
    refresh: Floats
    up: Floats
    down: Floats


def durations(speeds: Speeds, network: Links, rows: Floats, rows_per_step: float | None = None) -> Durations:
    """Seconds of the parts of a run over some links; ``rows (k,)`` are the most rows of a client in each cluster."""
    step = speeds.work(rows if rows_per_step is None else np.minimum(rows_per_step, rows))
    return Durations(step, speeds.work(rows), speeds.message(network.up), speeds.message(network.down))


def most_rows(tree: Hierarchy, rows: Ints) -> Floats:
    """The most rows of a client in each cluster, ``(k,)``; ``rows (n,)`` are those of each client."""
    most, filled = np.zeros(tree.n_clusters), np.flatnonzero(tree.sizes)
    if len(filled):
        most[filled] = np.maximum.reduceat(rows, tree.cluster_ptr[:-1][filled])
    return most


@dataclass(frozen=True)
class Timeline:
    """What each cluster does, in phases: first it computes, then it sends and receives, then it waits; ``(phases, k)`` each."""

    computing: Floats
    sending: Floats
    waiting: Floats

    @property
    def seconds(self) -> float:
        """Until the last cluster is done."""
        return float((self.computing + self.sending + self.waiting).sum(axis=0).max())

    @property
    def frame(self) -> pl.DataFrame:
        """One row for each part that takes time: ``cluster`` (a number), ``kind``, ``start`` and ``end`` in seconds."""
        parts = np.stack([self.computing, self.sending, self.waiting], axis=1)
        ends = parts.reshape(-1, parts.shape[2]).cumsum(axis=0).reshape(parts.shape)
        phase, kind, cluster = np.nonzero(parts > 0)
        end = ends[phase, kind, cluster]
        kinds = np.array([part.name for part in fields(self)])[kind]
        columns = {"cluster": cluster, "kind": kinds, "start": end - parts[phase, kind, cluster], "end": end}
        return pl.DataFrame(columns).sort("cluster", "start")


def timeline(rounds: Rounds, durations: Durations, *, barriers: bool) -> Timeline:
    """The phases of some rounds; with ``barriers`` all clusters wait for each other after every round."""
    together = rounds.together
    phases: list[tuple[Floats, Floats, Floats]] = []
    now = np.zeros(rounds.steps.shape[1])

    def add(computing: Floats, sending: Floats, waits: Anything) -> None:
        nonlocal now
        now = now + computing + sending
        waiting = np.where(waits, now.max(where=waits, initial=0.0) - now, 0.0)
        now = now + waiting
        phases.append((computing, sending, waiting))

    all_clusters = np.full(len(now), barriers)
    for r, here in enumerate(together):
        computing = rounds.steps[r] * durations.step
        if here.any():
            # Two messages up: from clients to servers, from servers to the centre. Then two down.
            add(computing + rounds.refresh[r] * durations.refresh, np.where(here, 2 * durations.up, 0.0), here | all_clusters)
            add(np.zeros_like(now), np.where(here, 2 * durations.down, 0.0), all_clusters)
        else:
            add(computing, np.where(rounds.within[r] > 0, durations.up + durations.down, 0.0), all_clusters)
    return Timeline(*(np.array(part) for part in zip(*phases, strict=True)))


def total_seconds(rounds: Rounds, durations: Durations, *, barriers: bool) -> float:
    """``timeline(...).seconds`` without the timeline: sums over the rounds between two exchanges of all clusters."""
    if rounds.present is not None:  # no exchange makes all clusters wait
        return timeline(rounds, durations, barriers=barriers).seconds
    everybody = (rounds.between > 0) | rounds.refresh
    alone = np.where(rounds.within > 0, durations.up + durations.down, 0.0)
    busy = rounds.steps * durations.step + np.where(everybody[:, None], 2 * durations.up, alone)
    busy += rounds.refresh[:, None] * durations.refresh
    down = 2 * durations.down
    if barriers:
        return float(busy.max(axis=1).sum() + everybody.sum() * down.max())
    first = np.flatnonzero(np.concatenate([[True], everybody[:-1]]))  # rounds that follow an exchange of all clusters
    together = np.add.reduceat(busy, first, axis=0)
    together[1:] += down
    return float(together.max(axis=1).sum() + (down.max() if everybody[-1] else 0.0))


def by_iteration(choices: Choices, merge: bool) -> Rounds:
    """The iterations as rounds of one iteration each; a step towards averages that needs no exchange has no entry."""
    T, k = choices.within.shape
    local = ~choices.between[:, None] & ~choices.within
    # After an exchange, and until a local step or a refresh, averages are up to date.
    fresh = np.concatenate([np.zeros((1, k), dtype=bool), (~local & ~choices.refresh[:, None])[:-1]])
    in_run = np.concatenate([[False], (choices.between & ~choices.refresh)[:-1]])
    between = choices.between & ~(merge & in_run)
    within = ~choices.between[:, None] & choices.within & ~(merge & fresh)
    # A refresh is an exchange of its own, after the iteration.
    order = np.sort(np.concatenate([np.arange(T), np.flatnonzero(choices.refresh) + 0.5]))
    first, extra = np.floor(order).astype(np.int64), order % 1 > 0
    start, once = np.broadcast_to(first[:, None], (len(first), k)), ~extra
    parts = (local[first] & once[:, None], between[first] & once, within[first] & once[:, None])
    steps, exchanged, inside = (part.astype(np.int64) for part in parts)
    return Rounds(start, steps, exchanged, inside, extra, None if choices.present is None else choices.present[first])


def timeline_of(schedule: Schedule, iterations: int, durations: Durations, mode: Mode) -> Timeline:
    """The phases of the first iterations of a schedule in one of the modes, without checks."""
    return timeline(_rounds(schedule, 0, iterations, mode), durations, barriers=mode != "asynchronous")


def seconds(schedule: Schedule, start: int, stop: int, durations: Durations, mode: Mode) -> float:
    """Seconds of iterations ``start`` to ``stop - 1`` in one of the modes, without checks."""
    pieces = (_rounds(schedule, first, last, mode) for first, last in schedule.pieces(start, stop))
    return sum(total_seconds(rounds, durations, barriers=mode != "asynchronous") for rounds in pieces)


def expected_seconds(schedule: Schedule, iterations: int, durations: Durations, mode: Mode) -> float:
    """Seconds that a run takes on average over its random choices: those of a long run, in proportion."""
    T = max(1000, _LONG // len(durations.step))
    return seconds(schedule, 0, T, durations, mode) * iterations / T


def check_seconds(durations: Durations) -> float:
    """Seconds of a check: all clusters compute full gradients and exchange, and wait for each other."""
    return float((durations.refresh + 2 * durations.up).max() + (2 * durations.down).max())


def run_seconds(course: Course, durations: Durations) -> dict[Mode, list[float]]:
    """Seconds until each check of a run has ended, by mode."""
    found: dict[Mode, list[float]] = {}
    for mode in MODES:
        passed, before, found[mode] = 0.0, 0, []
        for check in course.checks:
            passed += seconds(course.schedule, before, check, durations, mode) + check_seconds(durations)
            found[mode].append(passed)
            before = check
    return found


def _rounds(schedule: Schedule, start: int, stop: int, mode: Mode) -> Rounds:
    if mode not in MODES:
        raise one_of("mode", mode, MODES)
    choices = schedule.choices(start, stop)
    return by_iteration(choices, schedule.merge) if mode == "lock-step" else group(choices, start, schedule.merge)
