"""Sums of the clients' ``X'X`` and numbers of clients that decide whether variances are identifiable (:mod:`.identify`).

Where single clients matter, a node checks a property of each client and sends only the number of clients that have it.

    coordinator   sends   the working columns, the terms that vary by client, and (X'X)^-1 of all rows
    node          sends   Evidence: sums over its clients, in all and for each cluster, and numbers of clients
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np

from covey._typing import Floats, Ints
from covey.losses import loss_of
from covey.nodes.network import Message, Node, Sizes
from covey.records import Axes, Count, Reply
from covey.solvers.direct.elimination import Quadratic, solve_columns
from covey.solvers.direct.hessians import by_cell, leading_products
from covey.solvers.direct.spaces import space_of
from covey.tables.rows import GroupedData
from covey.threads import block_count, share
from covey.tree.hierarchy import segment_sum
from covey.variance import kernels
from covey.variance.columns import WorkingColumns, client_losses, client_rows, is_identity
from covey.variance.separation import n_alike

ROUNDING = 1e-13  # clients' columns are proportional to this precision
PROPORTIONAL = 1e-10  # degrees of freedom count columns as proportional to this precision
_ALIKE = 1e-12  # relative to a mean that is itself rounded
DETERMINED = 1e-8


@dataclass(frozen=True)
class ResidualEvidence(Reply):
    """The residual of a model where every client has separate coefficients of the varying terms, and all share the others.

    Attributes
    ----------
    within : the sum of squares about the clients' separate fits
    common, rhs : (s, s) and (s,), the normal equations of the shared terms after these fits
    rank : the number of coefficients in the clients' separate fits
    """

    within: float
    common: Annotated[Floats, Axes("shared shared")]
    rhs: Annotated[Floats, Axes("shared")]
    rank: int

    @classmethod
    def of(cls, losses: Quadratic, varying: Sequence[int]) -> ResidualEvidence:
        """From the losses of clients, or of clusters."""
        v = list(varying)
        return cls.of_rows(losses.C[:, v], losses.C.sum(axis=0), losses, varying)

    @classmethod
    def of_rows(cls, A: Floats, total: Floats, losses: Quadratic, varying: Sequence[int]) -> ResidualEvidence:
        """From the rows of the varying terms, ``A (n, v, d)``, and the sum over all clients of all rows."""
        v = list(varying)
        shared = [a for a in range(losses.r.shape[1]) if a not in v]
        Avv, Avs, bv = A[:, :, v], A[:, :, shared], losses.r[:, v]
        solved, ranks = solve_columns(Avv, np.concatenate([Avs, bv[:, :, None]], axis=2)) if v else (Avs, np.zeros(1))
        into, fits = (solved[:, :, :-1], solved[:, :, -1]) if v else (Avs, bv)
        within = 2 * losses.c - np.einsum("iv,iv->i", bv, fits)
        stacked = len(A) * len(v), len(shared)
        common = total[np.ix_(shared, shared)] - into.reshape(stacked).T @ Avs.reshape(stacked)
        rhs = (losses.r[:, shared] - np.einsum("iva,iv->ia", Avs, fits)).sum(axis=0)
        rank = int(ranks.sum())
        return cls(float(within.sum()), common, rhs, rank)


@dataclass(frozen=True)
class Evidence(Reply):
    """Sums over a node's clients that decide whether the variances are identifiable.

    Attributes
    ----------
    cluster_sums : each cluster's sum of its clients' losses about the origin (for counts and classes ``X'WX`` and ``X'Wy``)
    gram_squares, gram_products : (d, d) sums of squared entries of the clients' ``X'X``, and of their products with the entry
        on the diagonal of the same row
    n_several_rows : the number of clients with more than one row of positive weight
    not_proportional : (d, d) the number of clients within which two terms are not proportional, beyond rounding
    clearly_not_proportional : the same for the user's columns, to the precision ``PROPORTIONAL``
    not_determined : (d,) the number of clients whose coefficient of a term the common coefficients do not determine
    residual : the residual of a linear model where clients have separate coefficients
    n_both_classes : the number of clients whose sum of responses is neither 0 nor their number of rows. For classes these are
        the clients with rows of both classes; other families do not use it
    n_repeated : the number of clients with more than one row
    n_one_class : (d,) for each column of zeros and ones, the number of clients whose rows with a one have one class, or only
        counts of zero. Linear models do not use it
    cluster_ones, cluster_rows : (k,) each cluster's sum of responses (for classes the number of rows of class 1), and its
        number of rows; only classes use them
    """

    cluster_sums: Quadratic
    gram_squares: Annotated[Floats, Axes("d d", "square")]
    gram_products: Annotated[Floats, Axes("d d")]
    n_several_rows: int
    not_proportional: Annotated[Floats, Axes("d d", "count")]
    clearly_not_proportional: Annotated[Floats, Axes("d d", "count")]
    not_determined: Annotated[Floats, Axes("d", "count")]
    residual: ResidualEvidence
    n_both_classes: int
    n_repeated: int
    n_one_class: Annotated[Floats, Axes("d", "count")]
    cluster_ones: Annotated[Floats, Axes("k")]
    cluster_rows: Annotated[Floats, Axes("k", "count")]


@dataclass(frozen=True)
class WeighEvidence(Message[Evidence], label="weigh evidence", phase="learn"):
    """Use these working columns from now on, and sum the evidence.

    ``varying`` are the terms that vary by client. ``inverse (d, d)`` is the inverse of ``X'X`` of all rows of all nodes.
    """

    columns: WorkingColumns
    varying: tuple[int, ...]
    inverse: Annotated[Floats, Axes("d d")]

    @property
    def sizes(self) -> Sizes:
        return {"shared": len(self.inverse) - len(self.varying)}

    def at(self, node: Node) -> Evidence:
        node.keep(self.columns)
        data, tree = client_rows(node), node.data.hierarchy
        losses, rows, in_user_units = self._whole(node) if self._needs_all(data) else self._some(node)
        if node.loss.reml:
            residual = ResidualEvidence.of_rows(rows.pick(self.varying), losses.C.sum(axis=0), losses, self.varying)
        else:
            s = data.n_terms - len(self.varying)
            residual = ResidualEvidence(0.0, np.zeros((s, s)), np.zeros(s), 0)  # there is no residual to identify
        ones, many = segment_sum(data.y, data.client_ptr), data.rows_per_client.astype(np.float64)
        return Evidence(
            Quadratic(losses.C, *(tree.sum_up(part) for part in (losses.r, losses.c, losses.n))),
            rows.squares(),
            rows.products(),
            int((losses.n > 1).sum()),
            rows.n_not_proportional(ROUNDING),
            in_user_units.n_not_proportional(PROPORTIONAL),
            rows.n_not_determined(self.inverse),
            residual,
            int(((ones != 0) & (ones != many)).sum()),
            int((many > 1).sum()),
            np.zeros(data.n_terms) if node.loss.reml else n_alike(rows.diagonal, losses.r, node.loss),
            tree.sum_up(ones),
            tree.sum_up(many),
        )

    def _needs_all(self, data: GroupedData) -> bool:
        return space_of(data.n_terms, len(self.varying)) != "leading"

    def _whole(self, node: Node) -> tuple[Quadratic, GramRows, GramRows]:
        """The clients' losses with ``C (k, d, d)`` summed by cluster, and their ``X'X``, the second in the user's units."""
        data, tree = client_rows(node), node.data.hierarchy
        if node.loss.reml:
            losses = client_losses(node)
        else:
            n, d = data.n_clients, data.n_terms
            here = loss_of("gaussian").expand(replace(data, offset=None), np.zeros((n, d)))
            losses = Quadratic(here.hessian, -here.gradient, np.zeros(n), data.rows_that_count)
        rows, in_user_units = (GramRows.of(A) for A in (losses.C, self.columns.losses_to_user_units(losses).C))
        return replace(losses, C=tree.sum_up(losses.C)), rows, in_user_units

    def _some(self, node: Node) -> tuple[Quadratic, GramRows, GramRows]:
        """The same, but only the rows of the terms that vary by client and of the intercept."""
        data, n, d = client_rows(node), node.data.n_clients, node.data.n_terms
        loss = node.loss if node.loss.reml else loss_of("gaussian")
        data = data if node.loss.reml else replace(data, offset=None)
        here = loss.expand_rows(data, np.tile(self.columns.origin if node.loss.reml else np.zeros(d), (n, 1)))
        rows_of_cells = data.client_ptr[data.hierarchy.cluster_ptr]
        losses = Quadratic(
            by_cell(data.X, data.X, here.curves, rows_of_cells), -here.gradient, here.value, data.rows_that_count
        )
        if not node.loss.reml:
            losses = replace(losses, c=np.zeros(n))
        one = {data.terms.index("Intercept")} if "Intercept" in data.terms else set()
        terms = np.array(sorted({*self.varying, *one, self.columns.one} - {-1}), dtype=np.int64)
        rows = GramRows.of_rows(data, here.curves, terms)
        same = is_identity(self.columns.basis)
        return losses, rows, rows if same else GramRows.of_rows(node.data, here.curves, np.array(sorted(one), dtype=np.int64))


@dataclass(frozen=True)
class GramRows:
    """The rows ``terms`` of matrices ``X'X`` of clients or clusters, ``A (n, len(terms), d)``, and their diagonals ``(n, d)``.

    The methods return numbers for pairs of terms, ``(d, d)``, or for terms, ``(d,)``; they are zero without one of these rows.
    """

    A: Floats
    diagonal: Floats
    terms: Ints

    @classmethod
    def of(cls, A: Floats) -> GramRows:
        """All rows of whole matrices ``A (n, d, d)``."""
        return cls(A, np.einsum("iaa->ia", A), np.arange(A.shape[1]))

    @classmethod
    def of_rows(cls, data: GroupedData, curves: Floats, terms: Ints) -> GramRows:
        diagonal = segment_sum(curves[:, None] * data.X**2, data.client_ptr)
        return cls(leading_products(data, curves, terms), diagonal, terms)

    def pick(self, terms: Sequence[int]) -> Floats:
        """The rows of some of the terms."""
        return self.A[:, [int(np.flatnonzero(self.terms == a)[0]) for a in terms]]

    def squares(self) -> Floats:
        """The sums of squared entries."""
        return self._in_place((self.A**2).sum(axis=0), both=True)

    def products(self) -> Floats:
        """The sums of each entry times the entry on the diagonal of its row."""
        return self._in_place(np.einsum("ia,iab->ab", self.diagonal[:, self.terms], self.A), both=False)

    def n_not_proportional(self, precision: float) -> Floats:
        """For each pair of terms, the number of matrices with columns of ``X`` that are not proportional."""
        blocks, (_, q, d) = block_count(len(self.A)), self.A.shape
        count = np.empty((blocks, q, d), dtype=np.int64)
        share(kernels.count_not_proportional, blocks, self.A, self.diagonal, self.terms, precision, count)
        return self._in_place(count.sum(axis=0), both=True)

    def n_not_determined(self, inverse: Floats) -> Floats:
        """The number of clients or clusters whose coefficient of a term the common coefficients do not determine, ``(d,)``."""
        blocks, (_, q, d) = block_count(len(self.A)), self.A.shape
        count, whole = np.empty((blocks, q), dtype=np.int64), np.zeros(d)
        arrays = self.A, self.diagonal, self.terms, np.ascontiguousarray(inverse)
        share(kernels.count_not_determined, blocks, *arrays, DETERMINED, count)
        whole[self.terms] = count.sum(axis=0)
        return whole

    def _in_place(self, rows: Floats, *, both: bool) -> Floats:
        whole = np.zeros((rows.shape[1], rows.shape[1]))
        whole[self.terms] = rows
        if both:
            whole[:, self.terms] = rows.T
        return whole


@dataclass(frozen=True)
class CountUnlike(Message[Count], label="clients unlike the others", phase="learn"):
    """Count the clients whose ``x'x`` over the varying terms differs from ``mean``, the mean over all clients.

    ``mean`` has one value per term, or one for their sum.
    """

    varying: tuple[int, ...]
    mean: Floats

    def at(self, node: Node) -> Count:
        data, v = client_rows(node), list(self.varying)
        curves = node.loss.expand_rows(data, np.zeros((data.n_clients, data.n_terms))).curves
        size = segment_sum(curves[:, None] * data.X[:, v] ** 2, data.client_ptr)
        total = size if len(self.mean) == size.shape[1] else size.sum(axis=1, keepdims=True)
        return Count(int((np.abs(total - self.mean) > _ALIKE * np.abs(self.mean)).any(axis=1).sum()))
