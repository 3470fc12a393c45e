"""A federated run in words: the model, who took part, what was sent and what that was planned to be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from covey.describe import describe
from covey.federation.coordinator import Exchange
from covey.ledger import links, quadratic_links
from covey.solvers import BY_COINS, DIRECT
from covey.solvers.costs import BANDWIDTH, LATENCY

if TYPE_CHECKING:
    from covey.federation.operate import Outcome

AGREE = 1e-8  # of coefficients: what a search for variances leaves to its own tolerance
_AROUND = ("hello", "salt", "agree", "deliver")  # exchanges before and after the fit
_MOST = 12  # kinds of exchange listed


def report(outcome: Outcome) -> str:
    """The text that ends a run."""
    lines = [describe(outcome.model), "", *who(outcome), "", *costs(outcome.exchanges), *planned(outcome)]
    return "\n".join(lines)


def planned(outcome: Outcome) -> list[str]:
    """What the plan would have said of the fit's own exchanges; it knows solvers with given penalties."""
    end, (k, d) = outcome.model.convergence, outcome.model.w.shape
    if end.solver in DIRECT:
        link = quadratic_links(np.ones(k, dtype=np.int64), d)
    elif end.solver in BY_COINS:
        link = links(np.ones(k, dtype=np.int64), d)
    else:
        return []
    fit = [each for each in outcome.exchanges if each.what not in _AROUND]
    floats = 8 * k * (link.up + link.down) * len(outcome.roster) * end.exchanges
    seconds = 2 * LATENCY * end.exchanges + floats / len(outcome.roster) / (1e6 * BANDWIDTH)
    sent, took = sum(each.down + each.up for each in fit), sum(each.seconds for each in fit)
    plan = f"{_times(end.exchanges)}, {size(floats)}, {seconds:.2f} s at {1000 * LATENCY:g} ms a message"
    times = sum(each.what != "down" for each in fit)  # which is the second half of "up"
    return [f"the fit alone: planned {plan}; sent {_times(times)}, {size(sent)}, {took:.2f} s"]


def _times(count: int) -> str:
    return f"{count:,} exchange" + ("" if count == 1 else "s")


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
    return said


def costs(exchanges: Sequence[Exchange]) -> list[str]:
    """What was sent, by kind of exchange."""
    head = f"{'exchange':12}{'times':>7}{'sites':>7}{'down':>12}{'up':>12}{'seconds':>10}"
    kinds = list(dict.fromkeys(each.what for each in exchanges))
    rows = [_row(kind, [each for each in exchanges if each.what == kind]) for kind in kinds[:_MOST]]
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
