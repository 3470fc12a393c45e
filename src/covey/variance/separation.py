"""Responses that are all alike: one class, or counts of zero.

If all rows of a group have one class, its rows alone would make its coefficient infinite. The variance between groups keeps it
finite, so the model is fitted, and a note says how many groups there are. The same holds for the rows of one category in a
group, if its coefficient varies.

If a fixed effect separates the responses of all rows, its coefficient has no finite estimate for any random effects:
the likelihood rises without end along the separating direction, so it rises after integration too. Only then is it an error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from covey._typing import Anything, Floats
from covey.errors import DataError, listing
from covey.losses import Loss
from covey.tree.hierarchy import Hierarchy
from covey.variance.columns import RowTotals
from covey.variance.parameters import Shape

_MOST = 4
_CATEGORY = re.compile(r"(.+)\[(?:T\.)?([^\[\]]+)\]")


def n_alike(size: Floats, r: Floats, loss: Loss) -> Floats:
    """For each column of zeros and ones, the number of units whose rows with a one are all alike, ``(d,)``.

    ``size (n, d)`` is the diagonal of ``X'WX`` of each unit, and ``r (n, d)`` is ``X'Wy``. For other columns the number means
    nothing.
    """
    alike = r <= 0
    if loss.two_classes:
        alike |= r >= (1 - 1e-12) * size
    return np.asarray(((size > 0) & alike).sum(axis=0), dtype=np.float64)


def notes_on_groups(
    clients: Floats, clusters: Floats, shape: Shape, totals: RowTotals, tree: Hierarchy, terms: Sequence[str], loss: Loss
) -> tuple[str, ...]:
    """A sentence on groups whose rows are all alike; ``clients`` and ``clusters (d,)`` are their numbers by term."""
    category = (totals.ones == totals.squares) & (totals.ones == totals.total)
    parts, everywhere = [], False
    for level, varying, counts, n in (
        ("client", shape.client, clients, tree.n_clients),
        ("cluster", shape.cluster, clusters, tree.n_clusters),
    ):
        for a in varying:
            if category[a] and counts[a]:
                rows = "all rows" if totals.ones[a] == totals.rows else f"all rows with {_category(terms[a])}"
                parts.append(f"{rows} of {counts[a]:.0f} of {n} {level}s")
                everywhere |= bool(counts[a] == n)
    if not parts:
        return ()
    what = "have one class" if loss.two_classes else "have the count 0"
    more = "" if len(parts) <= _MOST else " (and others)"
    so = "the variance between groups keeps their coefficients finite"
    if everywhere:
        so = "where that holds for all groups, their variance is hardly determined"
    return (f"{', '.join(parts[:_MOST])}{more} {what}; {so}",)


def separation(terms: Sequence[str], runaway: Anything, loss: Loss) -> DataError:
    """The error if fixed effects grow without bound; ``runaway (d,)`` says which."""
    names = [terms[a] for a in np.flatnonzero(runaway).tolist()]
    categories = [_CATEGORY.fullmatch(name) for name in names if name != "Intercept"]
    columns = {match[1] if match else None for match in categories}
    alike = "the same class" if loss.two_classes else "the count 0"
    responses = "classes" if loss.two_classes else "counts"
    what, fix = f"The fixed effects {listing(names, 3)} separate the {responses} of all rows", "leave one of them out"
    if len(names) == 1:
        what, fix = f"The fixed effect {names[0]!r} separates the {responses} of all rows", "leave it out"
    if len(columns) == 1 and None not in columns and ":" not in "".join(names):
        (column,) = columns
        levels = listing([match[2] for match in categories if match], 3)
        which = f"each of the categories {levels}" if len(names) > 1 else f"the category {levels}"
        which = "the reference category" if "Intercept" in names else which
        what = f"In {which} of {column!r} all rows have {alike}"
        fix = f"merge it with another category, or leave out its rows or {column!r}"
    of = f"coefficient{'s' if len(names) > 1 else ''} of {listing(names, 3)} {'have' if len(names) > 1 else 'has'}"
    return DataError(
        f"{what}, so the {of} no finite estimate; random effects do not help. Either {fix}, or give penalties, "
        "gamma= and ridge= (with client= in place of bars)."
    )


def _category(term: str) -> str:
    match = _CATEGORY.fullmatch(term)
    return f"{match[1]} = {match[2]!r}" if match and ":" not in term else repr(term)
