"""Sums of products in place of rows: all that a linear fit needs of a client.

A Gaussian loss depends on the rows of a client only through the products ``Z'WZ`` of its columns ``Z = [1, X, y]``. So a client
may be given by these sums, which a database computes where the rows are. :func:`rows_from_sums` turns the sums into a few rows
with the same products, ``R`` with ``R'R = Z'WZ``, one row for each column of ``Z``. The result is :class:`GroupedData` like any
other, so every solver, every test and every interval of a linear model runs on it as it runs on the rows of a table. What the
products do not tell, such as the number of rows, is in :class:`RowSums`.

The products are of columns less a centre that all clients share, near the mean of the column. Otherwise the squares of a column
far from zero, such as a year, would leave no digits for its spread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from covey._typing import Floats, Ints
from covey.errors import DataError
from covey.kernels import square_roots
from covey.tables.rows import GroupedData, group_ids
from covey.threads import share


@dataclass(frozen=True)
class RowSums:
    """What is known of the rows behind the sums of each client.

    Attributes
    ----------
    rows, counted : (n,) the number of rows, and of rows with a positive weight
    weight, log_weights : (n,) the sum of the weights, and of the logarithms of positive weights
    unit : (N,) the column of ones, in the rows that stand for the sums
    """

    rows: Ints
    counted: Floats
    weight: Floats
    log_weights: Floats
    unit: Floats

    def clients(self, start: int, stop: int, client_ptr: Ints) -> RowSums:
        """The sums of clients ``start:stop``."""
        part, unit = slice(start, stop), self.unit[client_ptr[start] : client_ptr[stop]]
        return RowSums(self.rows[part], self.counted[part], self.weight[part], self.log_weights[part], unit)

    def pooled(self) -> RowSums:
        """The sums of all rows, as of one client."""
        rows, *sums = (part.sum(keepdims=True) for part in (self.rows, self.counted, self.weight, self.log_weights))
        return RowSums(rows, sums[0], sums[1], sums[2], self.unit)


@dataclass(frozen=True)
class Products:
    """Sums of products of centred columns, of ``m`` parts of a table; a client may have several parts.

    Attributes
    ----------
    gram : (m, q, q) the products of ``1``, the centred columns and the centred response, in this order
    rows, counted, weight, log_weights : (m,) as in :class:`RowSums`
    centre : (q,) what was subtracted; 0 for the column of ones
    columns : for each term the position of its column in ``gram``, and a factor; a constant term is a multiple of column 0
    """

    gram: Floats
    rows: Ints
    counted: Floats
    weight: Floats
    log_weights: Floats
    centre: Floats
    columns: Sequence[tuple[int, float]]


def rows_from_sums(products: Products, client: Any, cluster: Any, terms: tuple[str, ...], *, nested: bool) -> GroupedData:
    """Group sums by client and cluster, and write them as rows with the same products.

    Parameters
    ----------
    products : sums of ``m`` parts of a table
    client, cluster : (m,) ids, or None
    terms : the names of the ``d`` terms

    Returns
    -------
    GroupedData

    Examples
    --------
    >>> rows = np.array([[1.0, 2.0], [1.0, 4.0], [1.0, 9.0]])  # the column of ones, and the response
    >>> one, gram = np.array([3]), (rows.T @ rows)[None]
    >>> products = Products(gram, one, np.array([3.0]), np.array([3.0]), np.zeros(1), np.zeros(2), [(0, 1.0)])
    >>> data = rows_from_sums(products, ["a"], None, ("Intercept",), nested=False)
    >>> data.rows_per_client.tolist(), (data.X.T @ data.y).round(12).tolist(), round(float(data.y @ data.y), 12)
    ([3], [15.0], 101.0)
    """
    m, q = products.gram.shape[:2]
    if m == 0 or not products.rows.sum():
        raise DataError("The table has no rows; covey needs at least one.")
    order, part_ptr, tree = group_ids(client, cluster, m, nested)
    several = len(part_ptr) - 1 < m

    def of_clients(values: Any) -> Any:
        sorted_ = values if order is None else values[order]
        return np.add.reduceat(sorted_, part_ptr[:-1], axis=0) if several else sorted_

    n, R = tree.n_clients, np.ascontiguousarray(of_clients(products.gram))
    share(square_roots, n, R)
    R = R.reshape(n * q, q)
    unit = np.ascontiguousarray(R[:, 0])
    X = np.empty((n * q, len(terms)))
    for a, (at, factor) in enumerate(products.columns):
        X[:, a] = factor * (R[:, at] + products.centre[at] * unit) if at else factor * unit
    rows, counted = of_clients(products.rows), of_clients(products.counted)
    sums = RowSums(rows, counted, of_clients(products.weight), of_clients(products.log_weights), unit)
    if not sums.weight.any():
        raise DataError("All weights are zero; give at least one row a positive weight.")
    y = R[:, -1] + products.centre[-1] * unit
    return GroupedData(X, y, np.arange(n + 1) * q, tree, terms, sums=sums)
