"""A federated run in words: the model, who took part, what was sent and what that was planned to be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from covey.exact import LIMBS, WIDE
from covey.federation.operator.coordinator import Exchange
from covey.model.summary import describe
from covey.solvers.costs import BANDWIDTH, LATENCY
from covey.solvers.ledger import links, quadratic_links
from covey.solvers.registry import direct, randomised

if TYPE_CHECKING:
    from covey.federation.operator.operate import Outcome

AGREE = 1e-8  # of coefficients: what a search for variances leaves to its own tolerance
_PLANNED = {
    **dict.fromkeys(direct(), ("up", "down", "begin", "move")),
    **dict.fromkeys(randomised(), ("go", "whereabouts", "checkat")),
}
_SECOND = ("down", "checkat")  # the second halves of a sweep and of a check, which the plan counts once
_MEASURING = ("rows", "curve", "draw", "apply", "subtract", "missed", "exponents", "mantissas", "basissize", "perfect")


def report(outcome: Outcome) -> str:
    """The text that ends a run."""
    lines = [describe(outcome.model), "", *who(outcome), "", *costs(outcome.exchanges), *planned(outcome)]
    return "\n".join(lines)


def planned(outcome: Outcome) -> list[str]:
    """What the plan's arithmetic says of the exchanges that it covers, beside what they took; the others on lines of their own.

    How many these are is told by the steps and the coins of the run itself: ``covey plan`` has a bound for them before it.
    """
    model, solver = outcome.model, outcome.model.convergence.solver
    learned = model.spec.learns is not None
    if solver not in _PLANNED or (learned and solver in direct()):
        return []
    fit = _since_agreed(outcome.exchanges)
    own = [each for each in fit if each.what in _PLANNED[solver]]
    measuring = [each for each in fit if each.what in _MEASURING]
    others = [each for each in fit if each.what not in (*_PLANNED[solver], *_MEASURING)]
    plan, assumed = _plan(outcome, own)
    lines = [f"exchanges of the fit itself: planned {plan}; made {_spent(own)}", f"  planned with {assumed}"]
    for part, why in ((measuring, "to measure the problem"), (others, "to learn the penalties" if learned else "besides")):
        if part:
            lines.append(f"  not in the plan, {why}: {_spent(part)}")
    return lines


def _plan(outcome: Outcome, own: Sequence[Exchange]) -> tuple[str, str]:
    """Exchanges, bytes over all sites and seconds, as the plan counts them; and what it takes numbers and messages to cost."""
    end, (k, d), sites = outcome.model.convergence, outcome.model.w.shape, len(outcome.roster)
    by_coins = end.solver in randomised()
    link = (links if by_coins else quadratic_links)(np.ones(k, dtype=np.int64), d)
    checks = sum(each.what == "checkat" for each in own)
    moves = end.exchanges - checks
    up, down = k * (link.up * moves + (link.up + 2) * checks), k * (link.down * moves + link.up * checks)
    # Under masks every number is a wide exact sum; sums of the algorithms by coins are exact in any case; each with its size.
    masked = any(each.what == "salt" for each in outcome.exchanges)
    number = 8 * (1 + (WIDE if masked else LIMBS if by_coins else 0))
    each_way = number * up + 8 * down
    count = end.exchanges + sum(each.what in _SECOND for each in own)
    seconds = 2 * LATENCY * count + each_way / (1e6 * BANDWIDTH)
    assumed = f"{number} bytes a number up and 8 down, {1000 * LATENCY:g} ms a message, {BANDWIDTH:g} MB/s"
    if by_coins:
        assumed += ", as often as the run's coins asked of the busiest cluster"
    return _costs(count, each_way * sites, seconds), assumed


def _since_agreed(exchanges: Sequence[Exchange]) -> list[Exchange]:
    """Those of the fit itself, from the last start on: a run that lost a site has begun anew."""
    start = max((at for at, each in enumerate(exchanges) if each.what == "agree"), default=-1)
    return [each for each in exchanges[start + 1 :] if each.what not in ("last", "deliver")]


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
    """What was sent, by kind of exchange."""
    head = f"{'exchange':12}{'times':>7}{'sites':>7}{'down':>12}{'up':>12}{'seconds':>10}"
    kinds = list(dict.fromkeys(each.what for each in exchanges))
    rows = [_row(kind, [each for each in exchanges if each.what == kind]) for kind in kinds]
    return [head, *rows, _row("in all", exchanges)]


def _row(name: str, part: Sequence[Exchange]) -> str:
    down, up, seconds = sum(e.down for e in part), sum(e.up for e in part), sum(e.seconds for e in part)
    sites = max((e.sites for e in part), default=0)
    return f"{name:12}{len(part):>7}{sites:>7}{size(down):>12}{size(up):>12}{seconds:>10.2f}"


def size(count: float) -> str:
    """Bytes, with a unit."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
