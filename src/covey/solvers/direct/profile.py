"""Fit the coefficients of sparse shared columns with given penalties: Newton's method on the profile (:mod:`.shared`).

Given ``beta``, any direct solver finds the other coefficients, with ``Z beta`` as an offset. The gradient of the profile is
then that of the loss alone, ``Z'`` times the slopes of the rows. For a quadratic loss one step is exact.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from scipy import linalg, sparse

from covey._typing import Anything, Bools, Floats, Ints
from covey.errors import DataError, PenaltyError, SolverError, listing, warn
from covey.nodes.network import Network, Node, Request
from covey.objective.objective import Penalty
from covey.solvers.direct.elimination import solve_columns
from covey.solvers.direct.shared import Entries, Layout, SharedSums, add_all, eliminate_upper, sum_shared
from covey.solvers.result import Fit, SharedCoefficients, after
from covey.tables.rows import GroupedData
from covey.tables.sparse import SparseColumns

_DEPENDENT = 1e-9  # a column is dropped if this share of its squared norm, or less, is left beside other columns
_INVOLVED = 1e-6
_ARMIJO = 1e-4
_ROUNDING = 1e-14
_MOST_HALVINGS = 30
KEPT = "shared layout"  # the cached entry that does not depend on the coefficients


def shared_of(data: GroupedData) -> SparseColumns:
    """The sparse columns of rows that have some."""
    if data.shared is None:
        raise SolverError("These rows have no sparse columns.")
    return data.shared


@dataclass(frozen=True)
class PutShared(Request[None]):
    """Give the sparse columns the coefficients ``beta (s,)``: their part of the linear predictor becomes part of the offset."""

    beta: Floats

    def at(self, node: Node) -> None:
        node.data = replace(node.data, offset=shared_of(node.data).offset_with(self.beta))
        node.cache = {name: entry for name, entry in node.cache.items() if name == KEPT}


@dataclass(frozen=True)
class KeepShared(Request[None]):
    """Keep only the sparse columns where ``columns (s,)`` is true."""

    columns: Bools

    def at(self, node: Node) -> None:
        node.data = replace(node.data, shared=shared_of(node.data).keep(self.columns))
        node.cache.clear()


@dataclass(frozen=True)
class SumColumns(Request[tuple[Floats, Floats, Floats]]):
    """Return the products of all columns ``[X | Z]``, lower triangle; with the response; and which columns of ``Z`` are alike.

    A column of ``Z`` is alike if all its values have one sign, and all its rows the same class, or a count of zero.
    """

    def at(self, node: Node) -> tuple[Floats, Floats, Floats]:
        data, shared = node.data, shared_of(node.data)
        y = data.y if shared.offset is None else data.y - shared.offset
        weights = np.ones(data.n_rows) if data.weights is None else data.weights
        whole = sparse.hstack([sparse.csr_matrix(data.X), shared.Z, sparse.csr_matrix(y[:, None])], format="csr")
        whole.sort_indices()
        rows = Entries(whole.indptr.astype(np.int64), whole.indices.astype(np.int64), np.empty(0, dtype=np.int64))
        size = whole.shape[1] - 1
        gram, edge = np.zeros((size, size)), np.zeros(size + 1)
        add_all(rows, whole.data[:, None], weights[:, None, None], gram, edge)
        return gram, edge, self._alike(node, shared, weights > 0)

    def _alike(self, node: Node, shared: SparseColumns, counted: Bools) -> Floats:
        loss, y, signs = node.loss, node.data.y, shared.Z.sign()
        ones = counted.astype(np.float64)
        rows = abs(signs).T @ ones
        if not loss.two_classes and not (loss.link == "log" and (y[counted] == 0).any()):
            return np.zeros(len(rows))
        one_sign, total = np.abs(signs.T @ ones) == rows, abs(signs).T @ (ones * y)
        return np.asarray(one_sign & (rows > 0) & ((total == 0) | (loss.two_classes & (total == rows))), dtype=np.float64)


@dataclass(frozen=True)
class ProfileGradient(Request[Floats]):
    """Return the gradient of the losses in the coefficients of the sparse columns, ``(s,)``."""

    def at(self, node: Node) -> Floats:
        data, loss = node.data, node.loss
        slopes = loss.slopes(data.margin(node.coefficients()), data.y) * loss.scale(data)[data.client_of_row]
        slopes = slopes if data.weights is None else slopes * data.weights
        return np.asarray(shared_of(data).Z.T @ slopes)


@dataclass(frozen=True)
class ProfileSums(Request[SharedSums]):
    """Eliminate the clients at their coefficients, with their penalties."""

    def at(self, node: Node) -> SharedSums:
        data, d = node.data, node.data.n_terms
        if KEPT not in node.cache:
            Z = shared_of(data).Z
            node.cache[KEPT] = Layout.of(Z, Z.shape[1], data.client_ptr, data.hierarchy)
        curves = node.loss.expand_rows(data, node.coefficients()).curves
        S = np.eye(d) / node.gamma[:, None, None]
        return sum_shared(data, node.cache[KEPT], curves, S, response=False, ridge=node.loss.ridge)


# The coordinator


@dataclass(frozen=True)
class Prepared:
    """Sparse columns that are linearly independent of each other and of the dense terms.

    Attributes
    ----------
    terms : the names of all columns
    kept : (all,) those that are fitted; the others have the coefficient 0
    start : (s,) the least-squares coefficients of the kept columns, beside those of the dense terms; zero unless the loss is
        quadratic
    notes : a sentence on the others
    """

    terms: tuple[str, ...]
    kept: Bools
    start: Floats
    notes: tuple[str, ...]

    def coefficients(self, beta: Floats, errors: Floats) -> SharedCoefficients:
        """For all columns, from those of the kept ones."""
        whole, every = np.zeros(len(self.kept)), np.full(len(self.kept), np.nan)
        whole[self.kept], every[self.kept] = beta, errors
        return SharedCoefficients(self.terms, whole, every)


def prepare(network: Network) -> Prepared:
    """Leave out the sparse columns that other columns determine, as R does: the later ones."""
    node = network.clients()
    if node is None:
        raise SolverError("Sparse columns need all rows in memory.")
    terms, d = shared_of(node.data).terms, node.data.n_terms
    ((gram, edge, alike),) = network.every(SumColumns())
    if alike.any() and not node.loss.ridge:
        name = terms[int(alike.argmax())]
        what = "one class only" if node.loss.two_classes else "counts of zero only"
        raise DataError(
            f"The rows of {name!r} have {what} ({int(alike.sum())} such columns), so its coefficient has no finite estimate; "
            "merge rare categories, give the groups a variance, as in (1 | product), or set ridge= with given penalties."
        )
    gram += np.tril(gram, -1).T
    size = np.diag(gram)[d:].copy()
    into = solve_columns(gram[None, :d, :d], gram[None, :d, d:])[0][0]
    left = gram[d:, d:] - gram[d:, :d] @ into
    unit = np.sqrt(np.where(size > 0, size, 1.0))
    left /= unit[:, None] * unit
    kept, factor, order = independent(left)
    start = np.zeros(int(kept.sum()))
    if network.loss.quadratic and len(start):
        rhs = ((edge[d:-1] - edge[:d] @ into) / unit)[kept]
        if kept.all():
            start[order] = linalg.cho_solve((factor, False), rhs[order])
        else:
            start = linalg.solve(left[np.ix_(kept, kept)], rhs, assume_a="pos")
        start /= unit[kept]
    rows = float(node.data.rows_that_count.sum())
    if rows <= d + int(kept.sum()):
        raise DataError(
            f"There are {rows:.0f} rows for {d + int(kept.sum())} global coefficients; add rows, or leave out terms."
        )
    network.every(KeepShared(kept))
    if kept.all():
        return Prepared(terms, kept, start, ())
    gone = [term for term, keep in zip(terms, kept, strict=True) if not keep]
    are, have = ("is", "has") if len(gone) == 1 else ("are", "have")
    note = f"dropped: {listing(gone, 8)} {are} zero or a linear combination of the other terms, and {have} the coefficient 0"
    return Prepared(terms, kept, start, (note,))


def independent(gram: Floats) -> tuple[Bools, Floats, Ints]:
    """Which columns to keep, given their products ``(s, s)``, so that no column depends on others; later ones go first.

    Also returns the pivoted Cholesky factor of the products, an upper triangle, and the order of its columns.
    """
    s, kept = len(gram), np.ones(len(gram), dtype=bool)
    if not s:
        return kept, gram, np.empty(0, dtype=np.int64)
    factor, order, rank, _ = linalg.lapack.dpstrf(gram, tol=_DEPENDENT, lower=0)
    order = order - 1
    if rank == s:
        return kept, factor, order
    null = np.zeros((s - rank, s))
    null[:, order[:rank]] = -linalg.solve_triangular(factor[:rank, :rank], factor[:rank, rank:]).T
    null[np.arange(s - rank), order[rank:]] = 1.0
    for at in range(len(null)):  # each dependency gives up its last column
        column = int(np.flatnonzero(np.abs(null[at]) > _INVOLVED * np.abs(null[at]).max())[-1])
        kept[column] = False
        others = np.arange(len(null)) != at
        null[others] -= np.outer(null[others, column] / null[at, column], null[at])
    return kept, factor, order


def fit_profile(
    network: Network, penalty: Penalty, run: Callable[[Fit | None], Fit], *, tol: float = 1e-8, max_iter: int | None = None
) -> Fit:
    """Fit all coefficients; ``run`` fits all but those of sparse columns, beginning at another fit."""
    if (penalty.gamma == 0).any() or (penalty.lam == 0).any():
        raise PenaltyError("With sparse columns every gamma and lam must be positive, and alpha too; give small ones instead.")
    prepared, ridge = prepare(network), network.loss.ridge
    pull = ridge * network.tree.n_clients
    beta, d, most = prepared.start, len(network.terms), 100 if max_iter is None else max_iter
    with np.errstate(divide="ignore"):
        T = np.eye(d) / penalty.lam[:, None, None]
    fit, near = _at(network, beta, run, None), False
    for step in range(most + 1):
        (gradient,) = network.every(ProfileGradient())
        gradient = gradient + pull * beta
        norm, value = float(np.hypot(np.linalg.norm(gradient), fit.convergence.gradient_norm)), _value(fit, beta, pull)
        if norm < tol or near:
            return _finished(prepared, beta, fit, value, norm, step, True)
        (sums,) = network.every(ProfileSums())
        along = -eliminate_upper(sums, T, np.ones(d, dtype=bool)).solve(gradient)
        slope = float(gradient @ along)
        if step == most:
            return _finished(prepared, beta, fit, value, norm, step, False)
        near = -slope <= _ROUNDING * (1.0 + abs(value))  # values are rounded too much to compare: one last step
        length = 1.0
        for _ in range(_MOST_HALVINGS):
            other = _at(network, beta + length * along, run, fit)
            if near or _value(other, beta + length * along, pull) <= value + _ARMIJO * length * slope + _ROUNDING * abs(value):
                break
            length *= 0.5
        beta, fit = beta + length * along, after(fit, other)
    raise SolverError("The steps of the sparse columns did not end.")


def _at(network: Network, beta: Floats, run: Callable[[Fit | None], Fit], start: Fit | None) -> Fit:
    """All other coefficients, given those of the sparse columns."""
    network.every(PutShared(beta))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the last fit warns
        return run(start)


def _value(fit: Fit, beta: Floats, pull: float) -> float:
    return fit.convergence.objective + 0.5 * pull * float(beta @ beta)


def _finished(prepared: Prepared, beta: Floats, fit: Fit, value: float, norm: float, steps: int, near: bool) -> Fit:
    end = fit.convergence
    if end.converged and near:
        message = f"gradient norm {norm:.1e} after {steps} steps of the sparse columns and {end.iterations} of the others"
    else:
        message = f"{end.message}; {steps} steps of the sparse columns, gradient norm {norm:.1e}"
    message = "; ".join([message, *prepared.notes])
    end = replace(end, converged=end.converged and near, objective=value, gradient_norm=norm, gap=None, message=message)
    if not end.converged:
        warn(message)
    none: Anything = np.full(len(beta), np.nan)
    return replace(fit, convergence=end, shared=prepared.coefficients(beta, none))
