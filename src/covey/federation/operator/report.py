"""The report at the end of a federated run: the model, the sites, what was sent, and what the plan predicted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from covey.errors import size
from covey.exact import LIMBS, WIDE
from covey.federation.operator.journal import Exchange
from covey.model.summary import describe
from covey.solvers.costs import BANDWIDTH, LATENCY
from covey.solvers.ledger import links, quadratic_links
from covey.solvers.registry import direct, first_order

if TYPE_CHECKING:
    from covey.federation.operator.operate import Outcome

AGREE = 1e-8  # tolerance for coefficients: a search for variances stops at a tolerance of its own
_WIDTH = 26  # of the labels of messages


def report(outcome: Outcome) -> str:
    """The report of a run."""
    return "\n".join([describe(outcome.model), "", *who(outcome), "", *costs(outcome.exchanges), *planned(outcome)])


def planned(outcome: Outcome) -> list[str]:
    """The costs that the plan predicts for the exchanges of the fit, beside the real ones; other exchanges on their own lines.

    The prediction uses the steps and the random choices of the run itself. ``covey plan`` gives a bound before a run.
    """
    model, solver = outcome.model, outcome.model.convergence.solver
    if solver not in (*direct(), *first_order()) or (model.spec.learns is not None and solver in direct()):
        return []
    # After the last agreement: a run that lost a site has started again.
    start = max((at for at, each in enumerate(outcome.exchanges) if each.phase == "set-up"), default=-1)
    phases = {
        phase: [each for each in outcome.exchanges[start + 1 :] if each.phase == phase] for phase in ("fit", "learn", "measure")
    }
    plan, assumed = _plan(outcome, phases["fit"])
    lines = [f"exchanges of the fit itself: planned {plan}; made {_spent(phases['fit'])}", f"  planned with {assumed}"]
    for phase, why in {"learn": "to learn the penalties", "measure": "to measure the problem"}.items():
        if phases[phase]:
            lines.append(f"  not in the plan, {why}: {_spent(phases[phase])}")
    return lines


def _plan(outcome: Outcome, fit: Sequence[Exchange]) -> tuple[str, str]:
    """Predicted exchanges, bytes over all sites and seconds; and the assumed cost of a number and of a message."""
    end, (k, d), sites = outcome.model.convergence, outcome.model.w.shape, len(outcome.roster)
    randomised = end.solver in first_order()
    link = (links if randomised else quadratic_links)(np.ones(k, dtype=np.int64), d)
    second = sum(each.second for each in fit)  # second halves of a sweep or a check, which the plan counts once
    checks = second if randomised else 0
    moves = end.exchanges - checks
    up, down = k * (link.up * moves + (link.up + 2) * checks), k * (link.down * moves + link.up * checks)
    # Under masks every number is a wide exact sum, in randomised algorithms an exact sum; each sum has 8 bytes for its size.
    number = 8 * (1 + (WIDE if outcome.secure else LIMBS if randomised else 0))
    each_way = number * up + 8 * down
    count = end.exchanges + second
    seconds = 2 * LATENCY * count + each_way / (1e6 * BANDWIDTH)
    assumed = f"{number} bytes a number up and 8 down, {1000 * LATENCY:g} ms a message, {BANDWIDTH:g} MB/s"
    if randomised:
        assumed += ", as often as the run's random choices asked of the busiest cluster"
    return _costs(count, each_way * sites, seconds), assumed


def _spent(part: Sequence[Exchange]) -> str:
    return _costs(len(part), sum(each.down + each.up for each in part), sum(each.seconds for each in part))


def _costs(count: int, bytes_: float, seconds: float) -> str:
    return f"{count:,}, {size(bytes_)}, {seconds:.2f} s"


def agreement(outcome: Outcome, apart: float) -> str:
    """Whether a run gives the coefficients of the fit in memory, and what was sent for it."""
    sites = len(outcome.roster)
    if apart <= AGREE:
        result = f"coefficients of all clients, clusters and the whole agree with those above (largest difference {apart:.0e})"
    else:
        result = f"coefficients differ from those above by up to {apart:.1e}"
    head = f"The same fit across {sites} sites that keep their rows: {result}."
    return "\n".join([head, "What was sent:", *costs(outcome.exchanges)])


def who(outcome: Outcome) -> list[str]:
    """The sites that took part, and those that did not."""
    lines = [f"Sites: {', '.join(outcome.roster)}"]
    lines += [f"Without {site}, which {why}: its clients are in no sum of this fit" for site, why in outcome.without.items()]
    missed = outcome.missed.items()
    lines += [f"{site} took part, but {why} at the end: it has no models of its clients from this fit" for site, why in missed]
    return lines


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
