"""Whether each sum that leaves a site is over enough clients, and whether two runs together would show a few clients.

The sums of a fit are sums over the clients of a cell of products of terms and response. A sum hides a client only if enough
others contribute to it. For each cell and each column this module counts the clients that contribute, and computes the largest
share of one client in the sum of squares. The columns are the terms, the response, a constant (numbers of rows and the sum of
all responses leave too), and offset and weights (another run without them shows their sums by difference). The receiver can
also combine columns: an indicator of all clients but one gives, with the constant, an indicator of that one. So the largest
share is taken over all linear combinations too; it is the largest eigenvalue of a client's products relative to those of its
cell. And a column that has one value for all but a few clients shows these few, as its difference from the constant; so the
clients are counted whose values differ from the column's median.

If an engine holds the rows, the products come from its sums by client, and there are no medians. The value that most clients
have in all their rows takes the place of the median. This refuses all that the median refuses; it also refuses a column in
which the few clients that differ have most of the rows.

Two runs over sets of clients that differ by a few show these few by difference. The site keeps, for each run, keyed hashes of
its clients with their numbers of rows, and the cells that they were in, in ``home/released.json``. The key stays there too.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from covey._typing import Floats, Ints
from covey.federation.site.policy import Policy, refusal
from covey.federation.site.state import Document
from covey.federation.wire.codec import keyed_hash
from covey.tables.rows import GroupedData

COMBINED, NUMBER = "a combination of terms", "the number of clients"
_CONTRIBUTES = 0.01  # least part of a cell's mean sum of squares with which a client counts as one that contributes
_DIFFERS = 1e-6  # the same for a column less its median
_ROUNDING = 1e-13  # part of a column's mean square below which a client's sum of squares, from a database, is rounding
_KEPT = 1e-9  # combinations of terms with less of the sum of squares than this are zero up to rounding


@dataclass(frozen=True)
class WeakSum:
    """A sum that may not leave: its cell, its term, how many clients contribute, and the largest share of one of them.

    If ``rare``, all clients contribute, and ``clients`` are those whose values differ from the column's median.
    """

    cell: Any
    term: str
    clients: int
    share: float
    rare: bool = False

    def __str__(self) -> str:
        how = "differ from the others" if self.rare else f"contribute, one has {self.share:.0%} of the squares"
        return f"{self.term} in {self.cell!r}: {self.clients} clients {how}"


def weak_sums(
    data: GroupedData, minimum: int, share: float, *, combined: bool = True, moments: bool = False
) -> Iterator[WeakSum]:
    """All sums over fewer clients than the minimum, or in which one client has more than this share.

    Numbers of rows and sums of responses have no weights, nor have the ``moments`` of terms: they are checked without too.
    """
    if data.weights is not None:
        plain = data if moments else replace(data, X=data.X[:, :0], terms=())
        yield from weak_sums(replace(plain, weights=None, offset=None), minimum, share, combined=False)
    tree, labels, typical = data.hierarchy, (*data.terms, *_others(data)), None
    if data.sums is not None:
        squares = np.column_stack([data.X, *_others(data).values()]) ** 2
        typical = squares.sum(axis=0) / data.weight_of_client.sum()
    for at in np.flatnonzero(tree.sizes) if minimum > 1 or share < 1 else ():
        first, last = tree.cluster_ptr[at : at + 2]
        cell, (products, apart) = tree.cluster_ids[int(at)], _products(data, int(first), int(last), minimum, typical)
        squares = np.einsum("iaa->ia", products)
        total, n = squares.sum(axis=0), last - first
        counts = (squares > _CONTRIBUTES * total / n).sum(axis=0)
        unusual = _differing(apart)
        largest = squares.max(axis=0) / np.where(total > 0, total, 1.0)
        # A term that is zero for all clients of a cell has no sum there.
        weak = (total > 0) & ((counts < minimum) | (largest > share))
        yield from (WeakSum(cell, labels[j], int(counts[j]), float(largest[j])) for j in np.flatnonzero(weak))
        if n < minimum:
            yield WeakSum(cell, NUMBER, int(n), 1.0 / n)
        elif combined and not weak.any() and share < 1 and (largest_share := _largest_share(products)) > share:
            yield WeakSum(cell, COMBINED, int(n), largest_share)
        else:
            few = (unusual > 0) & (unusual < minimum) & ~weak
            yield from (WeakSum(cell, labels[j], int(unusual[j]), float(largest[j]), rare=True) for j in np.flatnonzero(few))


def _products(data: GroupedData, first: int, last: int, minimum: int, typical: Floats | None) -> tuple[Floats, Floats]:
    """For each of some clients the products of its columns, scaled to a common size ``(n, columns, columns)``.

    Also the sum of squares of each column less its median ``(n, columns)``. ``typical`` is for sums by client.
    """
    ptr = data.client_ptr[first : last + 1]
    rows, start = slice(int(ptr[0]), int(ptr[-1])), ptr[:-1] - ptr[0]
    columns = np.column_stack([data.X[rows], *(each[rows] for each in _others(data).values())]).astype(np.float64)
    if typical is not None:
        columns, apart = _from_sums(columns, data.unit[rows], start, minimum, typical)
    else:
        root = 1.0 if data.weights is None else np.sqrt(data.weights[rows])[:, None]
        apart, columns = (columns - np.median(columns, axis=0)) * root, columns * root
    size = np.abs(columns).max(axis=0, initial=0.0)
    size = np.where(size > 0, size, 1.0)
    columns, apart = columns / size, apart / size
    products = np.stack([columns[a:b].T @ columns[a:b] for a, b in zip(start, ptr[1:] - ptr[0], strict=True)])
    return products, np.add.reduceat(apart**2, start, axis=0)


def _differing(apart: Floats) -> Ints:
    """For each column the number of clients that differ from a value, given the squares of the difference ``(n, columns)``."""
    found: Ints = (apart > _DIFFERS * apart.sum(axis=0) / len(apart)).sum(axis=0)
    return found


def _from_sums(columns: Floats, unit: Floats, start: Ints, minimum: int, typical: Floats) -> tuple[Floats, Floats]:
    """Columns that stand for sums by client, and the same less the value that most clients have; rounding is taken out.

    ``typical`` are the mean squares of the columns at the whole site.
    """
    lengths = np.diff(np.append(start, len(unit)))
    weight = np.add.reduceat(unit**2, start)[:, None]

    def cleaned(rows: Floats) -> Floats:
        there = np.add.reduceat(rows**2, start) > _ROUNDING * weight * typical
        return np.where(np.repeat(there, lengths, axis=0), rows, 0.0)

    columns = cleaned(columns)
    means = np.add.reduceat(columns * unit[:, None], start) / weight
    # A value that all but fewer clients than the minimum have is the median, if these are fewer than half of the clients.
    n = len(means)
    tried = np.sort(means, axis=0)[[n // 2]] if n >= 2 * minimum else means
    apart, fewest = np.zeros_like(columns), np.full(columns.shape[1], n + 1)
    for value in tried:
        rest = cleaned(columns - value * unit[:, None])
        differing = _differing(np.add.reduceat(rest**2, start))
        better = differing < fewest
        apart[:, better], fewest = rest[:, better], np.minimum(differing, fewest)
    return columns, apart


def _others(data: GroupedData) -> dict[str, Floats]:
    """The columns beside the terms whose sums leave, or follow from the sums of several runs."""
    columns = {"the response": data.y, "the constant": data.unit, "the offset": data.offset}
    return {name: each for name, each in {**columns, "the weights": data.weights}.items() if each is not None}


def _largest_share(products: Floats) -> float:
    """The largest share of one client in the sum of squares of any linear combination."""
    total = products.sum(axis=0)
    scale = np.sqrt(np.where(np.diag(total) > 0, np.diag(total), 1.0))
    values, vectors = np.linalg.eigh(total / np.outer(scale, scale))
    kept = values > _KEPT * max(values[-1], 0.0)
    if not kept.any():
        return 0.0
    white = vectors[:, kept] / np.sqrt(values[kept]) / scale[:, None]
    return float(np.linalg.eigvalsh(white.T @ products @ white).max())


class Released:
    """The sets of clients of earlier runs, in ``home/released.json`` or in this object."""

    def __init__(self, home: Path | None) -> None:
        path = None if home is None else home / "released.json"
        self._file = Document(path, {"key": secrets.token_hex(32), "runs": {}})

    def admit(self, run: str, data: GroupedData, policy: Policy) -> None:
        """Refuse a run with a set of clients that differs from one of an earlier run by fewer than the minimum.

        An earlier start of this run counts too: between two starts of a run its table may have changed.
        """
        kept, tree = self._file.read(), data.hierarchy
        used = np.ones(data.n_clients) if data.weights is None else np.add.reduceat(data.weights, data.client_ptr[:-1])
        ids = zip(tree.identities.tolist(), data.rows_per_client.tolist(), tree.parent.tolist(), used.tolist(), strict=True)

        def hashed(what: Any) -> str:
            return keyed_hash(what, kept["key"])[:16]

        now = {hashed(client): [cell, hashed((client, rows))] for client, rows, cell, weight in ids if weight > 0}
        for before in kept["runs"].values() if policy.minimum > 1 else ():
            # An older version kept one hash of each client's id and number of rows, with its cell.
            listed = {client: each if isinstance(each, list) else [each, ""] for client, each in before.items()}
            if 0 < _least_difference(now, listed) < policy.minimum:
                why = f"At this site the clients of a cell, or all clients, differ by fewer than {policy.minimum} from those of"
                why = f"{why} an earlier run; both runs together would show these few"
                raise refusal("minimum", why, "lower the number")
        if now in kept["runs"].values():
            return
        starts = sum(name == run or name.startswith(f"{run}, start ") for name in kept["runs"])
        kept["runs"][f"{run}, start {starts + 1}" if starts else run] = now
        self._file.write(kept)


def _least_difference(now: dict[str, list[Any]], before: dict[str, list[Any]]) -> int:
    """The least number of clients, above zero, by which a set of one run differs from one of another.

    Each client has its cell and a hash of its number of rows; one whose rows changed differs too. The sets are the cells and
    the whole. Only sets that share a client can differ by fewer than both have.

    >>> _least_difference({"a": [0, "x"], "b": [0, "x"], "c": [1, "x"]}, {"a": [0, "x"], "b": [1, "x"], "c": [1, "x"]})
    1
    >>> _least_difference({"a": [0, "x"], "b": [0, "x"]}, {"a": [5, "x"], "b": [5, "x"]})
    0
    >>> _least_difference({"a": [0, "x"], "b": [0, "y"]}, {"a": [0, "x"], "b": [0, "x"]})
    1
    """
    both, same = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for client in now.keys() & before.keys():
        pair = now[client][0], before[client][0]
        both[pair] += 1
        same[pair] += now[client][1] == before[client][1]
    sizes = [Counter(cell for cell, _ in each.values()) for each in (now, before)]
    apart = [sizes[0][one] + sizes[1][two] - shared - same[one, two] for (one, two), shared in both.items()]
    whole = len(now.keys() | before.keys()) - same.total()
    return min((each for each in [*apart, whole] if each > 0), default=0)
