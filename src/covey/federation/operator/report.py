"""A federated run in words: the model, who took part, what was sent and what that was planned to be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from covey.exact import LIMBS, WIDE
from covey.federation.operator.journal import Exchange
from covey.fitting.planning import size
from covey.model.summary import describe
from covey.solvers.costs import BANDWIDTH, LATENCY
from covey.solvers.ledger import links, quadratic_links
from covey.solvers.registry import direct, first_order

if TYPE_CHECKING:
    from covey.federation.operator.operate import Outcome

AGREE = 1e-8  # of coefficients: what a search for variances leaves to its own tolerance
_WIDTH = 26  # of the labels of messages
_NOT_PLANNED = {"learn": "to learn the penalties", "measure": "to measure the problem"}


def report(outcome: Outcome) -> str:
    """The text that ends a run."""
    lines = [describe(outcome.model), "", *who(outcome), "", *costs(outcome.exchanges), *planned(outcome)]
    return "\n".join(lines)


def planned(outcome: Outcome) -> list[str]:
    """What the plan's arithmetic says of the exchanges that it covers, beside what they took; the others on lines of their own.

    How many these are follows from the steps and the random choices of the run itself: ``covey plan`` has a bound before it.
    """
    model, solver = outcome.model, outcome.model.convergence.solver
    if solver not in (*direct(), *first_order()) or (model.spec.learns is not None and solver in direct()):
        return []
    made = _since_agreed(outcome.exchanges)
    fit = [each for each in made if each.phase == "fit"]
    plan, assumed = _plan(outcome, fit)
    lines = [f"exchanges of the fit itself: planned {plan}; made {_spent(fit)}", f"  planned with {assumed}"]
    for phase, why in _NOT_PLANNED.items():
        part = [each for each in made if each.phase == phase]
        if part:
            lines.append(f"  not in the plan, {why}: {_spent(part)}")
    return lines


def _plan(outcome: Outcome, fit: Sequence[Exchange]) -> tuple[str, str]:
    """Exchanges, bytes over all sites and seconds, as the plan counts them; and what it takes numbers and messages to cost."""
    end, (k, d), sites = outcome.model.convergence, outcome.model.w.shape, len(outcome.roster)
    by_chance = end.solver in first_order()
    link = (links if by_chance else quadratic_links)(np.ones(k, dtype=np.int64), d)
    second = sum(each.second for each in fit)  # the second halves of a sweep and of a check, which the plan counts once
    checks = second if by_chance else 0
    moves = end.exchanges - checks
    up, down = k * (link.up * moves + (link.up + 2) * checks), k * (link.down * moves + link.up * checks)
    # Under masks every number is a wide exact sum; sums of randomised algorithms are exact in any case; each with its size.
    number = 8 * (1 + (WIDE if outcome.secure else LIMBS if by_chance else 0))
    each_way = number * up + 8 * down
    count = end.exchanges + second
    seconds = 2 * LATENCY * count + each_way / (1e6 * BANDWIDTH)
    assumed = f"{number} bytes a number up and 8 down, {1000 * LATENCY:g} ms a message, {BANDWIDTH:g} MB/s"
    if by_chance:
        assumed += ", as often as the run's random choices asked of the busiest cluster"
    return _costs(count, each_way * sites, seconds), assumed


def _since_agreed(exchanges: Sequence[Exchange]) -> list[Exchange]:
    """Those after the last agreement: a run that lost a site has begun anew."""
    start = max((at for at, each in enumerate(exchanges) if each.phase == "set-up"), default=-1)
    return list(exchanges[start + 1 :])


def _spent(part: Sequence[Exchange]) -> str:
    return _costs(len(part), sum(each.down + each.up for each in part), sum(each.seconds for each in part))


def _costs(count: int, bytes_: float, seconds: float) -> str:
    return f"{count:,}, {size(bytes_)}, {seconds:.2f} s"


def agreement(outcome: Outcome, apart: float) -> str:
    """That a run gives the coefficients of the fit in memory, or not, and what was sent for it."""
    sites = len(outcome.roster)
    if apart <= AGREE:
        said = f"coefficients of all clients, clusters and the whole agree with those above (largest difference {apart:.0e})"
    else:
        said = f"coefficients differ from those above by up to {apart:.1e}"
    head = f"The same fit across {sites} sites that keep their rows: {said}."
    return "\n".join([head, "What was sent:", *costs(outcome.exchanges)])


def who(outcome: Outcome) -> list[str]:
    """Who took part, and who did not."""
    said = [f"Sites: {', '.join(outcome.roster)}"]
    said += [f"Without {site}, which {why}: its clients are in no sum of this fit" for site, why in outcome.without.items()]
    missed = outcome.missed.items()
    said += [f"{site} took part, but {why} at the end: it has no models of its clients from this fit" for site, why in missed]
    return said


def costs(exchanges: Sequence[Exchange]) -> list[str]:
    """What was sent, by label of the message."""
    head = f"{'exchange':{_WIDTH}}{'times':>7}{'sites':>7}{'down':>12}{'up':>12}{'seconds':>10}"
    labels = list(dict.fromkeys(each.label for each in exchanges))
    rows = [_row(label, [each for each in exchanges if each.label == label]) for label in labels]
    return [head, *rows, _row("in all", exchanges)]


def _row(name: str, part: Sequence[Exchange]) -> str:
    down, up, seconds = sum(e.down for e in part), sum(e.up for e in part), sum(e.seconds for e in part)
    sites = max((e.sites for e in part), default=0)
    return f"{name:{_WIDTH}}{len(part):>7}{sites:>7}{size(down):>12}{size(up):>12}{seconds:>10.2f}"
