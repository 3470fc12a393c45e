"""The report at the end of a federated run: the model, the sites, and what was sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from covey.federation.operator.journal import Exchange
from covey.fitting.planning import size
from covey.model.summary import describe, table

if TYPE_CHECKING:
    from covey.federation.operator.operate import Outcome

AGREE = 1e-8  # tolerance for coefficients: a search for variances stops at a tolerance of its own


def report(outcome: Outcome) -> str:
    """The report of a run."""
    return "\n".join([describe(outcome.model), "", *site_lines(outcome), "", *costs(outcome.exchanges)])


def agreement(outcome: Outcome, apart: float) -> str:
    """Whether a run gives the coefficients of the fit in memory, and what was sent for it."""
    if apart <= AGREE:
        result = f"coefficients of clients, clusters and the global model agree with the above (largest difference {apart:.0e})"
    else:
        result = f"coefficients differ from those above by up to {apart:.1e}"
    head = f"The same fit across {len(outcome.roster)} sites that keep their rows: {result}."
    return "\n".join([head, "What was sent:", *costs(outcome.exchanges)])


def site_lines(outcome: Outcome) -> list[str]:
    """The sites that took part, and those that did not."""
    lines = [f"Sites: {', '.join(outcome.roster)}"]
    lines += [f"Without {site} ({why}): its clients are in no sum of this fit" for site, why in outcome.without.items()]
    late = "took part, but was lost at the end"
    lines += [f"{site} {late} ({why}): it has no models of its clients from this fit" for site, why in outcome.missed.items()]
    return lines


def costs(exchanges: Sequence[Exchange]) -> list[str]:
    """A table of what was sent, by label of the message."""
    labels = dict.fromkeys(each.label for each in exchanges)
    groups = {label: [each for each in exchanges if each.label == label] for label in labels} | {"in all": exchanges}
    rows = [("message", "times", "sites", "down", "up", "seconds")]
    for label, group in groups.items():
        down, up, seconds = (sum(getattr(each, name) for each in group) for name in ("down", "up", "seconds"))
        sites = max((each.sites for each in group), default=0)
        rows.append((label, str(len(group)), str(sites), size(down), size(up), f"{seconds:.2f}"))
    return table(rows, (-26, 6, 6, 11, 11, 9))
