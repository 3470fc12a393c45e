"""Sums of the clients' ``X'X`` and numbers of clients that decide whether variances are identifiable (:mod:`.identify`).

Where single clients matter, a node checks a property of each client and sends only the number of clients that have it.

    coordinator   sends   the working columns, the terms that vary by client, and (X'X)^-1 of all rows
    node          sends   Evidence: sums over its clients, in all and for each cluster, and numbers of clients
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from covey._typing import Floats
from covey.losses import loss_of
from covey.nodes.network import Message, Node, Sizes
from covey.records import Axes, Count, Reply
from covey.solvers.direct.elimination import Quadratic, solve_columns
from covey.tree.hierarchy import segment_sum
from covey.variance.columns import WorkingColumns, client_losses, client_rows

ROUNDING = 1e-13  # clients' columns are proportional to this precision
PROPORTIONAL = 1e-10  # degrees of freedom count columns as proportional to this precision
_ALIKE = 1e-12  # relative to a mean that is itself rounded
_DETERMINED = 1e-8
_BLOCK = 1 << 12  # clients whose matrices are in memory at the same time


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
        shared = [a for a in range(losses.r.shape[1]) if a not in v]
        Avv, Avs, bv = losses.C[:, v][:, :, v], losses.C[:, v][:, :, shared], losses.r[:, v]
        solved, ranks = solve_columns(Avv, np.concatenate([Avs, bv[:, :, None]], axis=2)) if v else (Avs, np.zeros(1))
        into, fits = (solved[:, :, :-1], solved[:, :, -1]) if v else (Avs, bv)
        within = 2 * losses.c - np.einsum("iv,iv->i", bv, fits)
        common = losses.C[:, shared][:, :, shared].sum(axis=0) - np.einsum("iva,ivb->ab", into, Avs)
        rhs = (losses.r[:, shared] - np.einsum("iva,iv->ia", Avs, fits)).sum(axis=0)
        rank = int(ranks.sum())
        return cls(float(within.sum()), common, rhs, rank)


@dataclass(frozen=True)
class Evidence(Reply):
    """Sums over a node's clients that decide whether the variances are identifiable.

    Attributes
    ----------
    cluster_sums : each cluster's sum of its clients' losses about the origin (for counts and classes ``X'X`` only)
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
        if node.loss.reml:
            losses = client_losses(node)
            residual = ResidualEvidence.of(losses, self.varying)
        else:
            n, d = data.n_clients, data.n_terms
            gram = loss_of("gaussian").hessian(data, np.zeros((n, d)))
            losses = Quadratic(gram, np.zeros((n, d)), np.zeros(n), data.rows_that_count)
            s = d - len(self.varying)
            residual = ResidualEvidence(0.0, np.zeros((s, s)), np.zeros(s), 0)  # there is no residual to identify
        ones, rows = segment_sum(data.y, data.client_ptr), data.rows_per_client.astype(np.float64)
        return Evidence(
            Quadratic(*(tree.sum_up(part) for part in (losses.C, losses.r, losses.c, losses.n))),
            (losses.C**2).sum(axis=0),
            products(losses.C),
            int((losses.n > 1).sum()),
            n_not_proportional(losses.C, ROUNDING),
            n_not_proportional(self.columns.losses_to_user_units(losses).C, PROPORTIONAL),
            n_not_determined(losses.C, self.inverse),
            residual,
            int(((ones != 0) & (ones != rows)).sum()),
            int((rows > 1).sum()),
            tree.sum_up(ones),
            tree.sum_up(rows),
        )


def n_not_proportional(A: Floats, precision: float) -> Floats:
    """For each pair of terms, the number of matrices ``X'X`` in ``A (n, d, d)`` with columns that are not proportional."""
    count = np.zeros(A.shape[1:])
    for start in range(0, len(A), _BLOCK):
        block = A[start : start + _BLOCK]
        size = np.einsum("iaa->ia", block)
        full = size[:, :, None] * size[:, None, :]
        count += (full - block**2 > precision * np.maximum(full, 1e-300)).sum(axis=0)
    return count


def products(A: Floats) -> Floats:
    """The sum over matrices ``A (n, d, d)`` of each entry times the entry on the diagonal of its row."""
    return np.asarray(np.einsum("iaa,iab->ab", A, A))


def n_not_determined(A: Floats, inverse: Floats) -> Floats:
    """The number of clients or clusters whose coefficient of a term the common coefficients do not determine, ``(d,)``."""
    count = np.zeros(A.shape[1])
    for start in range(0, len(A), _BLOCK):
        block = A[start : start + _BLOCK]
        total, fitted = np.einsum("iaa->ia", block), np.einsum("iac,iac->ic", block, inverse @ block)
        count += (total - fitted > _DETERMINED * total).sum(axis=0)
    return count


@dataclass(frozen=True)
class CountUnlike(Message[Count], label="clients unlike the others", phase="learn"):
    """Count the clients whose ``x'x`` over the varying terms differs from ``mean``, the mean over all clients.

    ``mean`` has one value per term, or one for their sum.
    """

    varying: tuple[int, ...]
    mean: Floats

    def at(self, node: Node) -> Count:
        size = np.einsum("iaa->ia", client_losses(node).C)[:, list(self.varying)]
        total = size if len(self.mean) == size.shape[1] else size.sum(axis=1, keepdims=True)
        return Count(int((np.abs(total - self.mean) > _ALIKE * np.abs(self.mean)).any(axis=1).sum()))
