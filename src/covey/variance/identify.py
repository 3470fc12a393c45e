"""Questions to all nodes before a search: totals, working columns, and whether the variances are identifiable.

If they are not, :func:`survey` raises an error that says which terms to leave out.

The covariance of the responses is a sum ``V = s2 I + sum_a s_a Z_a Z_a'`` with one matrix for each variance. The variances can
be identifiable only if these matrices, ``I`` included, are linearly independent. Under REML this is necessary, not sufficient.
Their inner products decide it: ``<Z_a Z_a', Z_b Z_b'>`` is the sum over groups of squared entries of ``X'X``, so it comes from
sums over clients. Where single clients matter, a node checks a property of each client and sends only the number of clients
that have it.

    coordinator   sends   the working columns, the terms that vary by client, and (X'X)^-1 of all rows
    node          sends   Evidence: sums over its clients, in all and for each cluster, and numbers of clients
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from covey._typing import Anything, Floats
from covey.errors import DataError, listing
from covey.losses import loss_of
from covey.nodes.network import Message, Network, Node
from covey.records import Count, Reply
from covey.solvers.direct.elimination import Quadratic, Spread, solve_symmetric
from covey.solvers.direct.newton import UpperLevels
from covey.tree.hierarchy import segment_sum
from covey.variance.columns import (
    CountingNetwork,
    Survey,
    TermOrder,
    WorkingColumns,
    choose_columns,
    client_losses,
    client_rows,
    threads_of,
)
from covey.variance.components import Kind, Shape
from covey.variance.laplace_likelihood import BeginMode, SumLogCounts, run_newton
from covey.variance.linear_likelihood import invert

_ROUNDING = 1e-13
_ALIKE = 1e-12  # relative to a mean that is itself rounded
_DETERMINED = 1e-8
_PROPORTIONAL = 1e-10  # degrees of freedom count columns as proportional to this precision
_BLOCK = 1 << 12  # clients whose matrices are in memory at the same time


# The node


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
    common: Floats
    rhs: Floats
    rank: int

    @classmethod
    def of(cls, losses: Quadratic, varying: Sequence[int]) -> ResidualEvidence:
        """From the losses of clients, or of clusters."""
        v = list(varying)
        shared = [a for a in range(losses.r.shape[1]) if a not in v]
        Avv, Avs, bv = losses.C[:, v][:, :, v], losses.C[:, v][:, :, shared], losses.r[:, v]
        into = [solve_symmetric(Avv, Avs[:, :, a]) if v else bv for a in range(len(shared))]
        fits = solve_symmetric(Avv, bv) if v else bv
        within = 2 * losses.c - np.einsum("iv,iv->i", bv, fits)
        common = losses.C[:, shared][:, :, shared].sum(axis=0)
        common -= np.array([np.einsum("iva,iv->a", Avs, column) for column in into]).reshape(common.shape)
        rhs = (losses.r[:, shared] - np.einsum("iva,iv->ia", Avs, fits)).sum(axis=0)
        rank = int(np.linalg.matrix_rank(Avv, hermitian=True).sum()) if v else 0
        return cls(float(within.sum()), common, rhs, rank)


@dataclass(frozen=True)
class Evidence(Reply):
    """Sums over a node's clients that decide whether the variances are identifiable.

    Attributes
    ----------
    cluster_sums : each cluster's sum of its clients' losses about the origin (for counts and classes ``X'X`` only)
    gram_squares : (d, d) sums of squared entries of the clients' ``X'X``
    n_several_rows : the number of clients with more than one row of positive weight
    not_proportional : (d, d) the number of clients within which two terms are not proportional, beyond rounding
    clearly_not_proportional : the same for the user's columns, to the precision ``_PROPORTIONAL``
    not_determined : (d,) the number of clients whose coefficient of a term the common coefficients do not determine
    residual : the residual of a linear model where clients have separate coefficients
    n_both_classes : the number of clients whose sum of responses is neither 0 nor their number of rows. For classes these are
        the clients with rows of both classes; other families do not use it
    n_repeated : the number of clients with more than one row
    cluster_ones, cluster_rows : (k,) each cluster's sum of responses (for classes the number of rows of class 1), and its
        number of rows; only classes use them
    """

    cluster_sums: Quadratic
    gram_squares: Floats
    n_several_rows: int
    not_proportional: Floats
    clearly_not_proportional: Floats
    not_determined: Floats
    residual: ResidualEvidence
    n_both_classes: int
    n_repeated: int
    cluster_ones: Floats
    cluster_rows: Floats


@dataclass(frozen=True)
class WeighEvidence(Message[Evidence], label="weigh evidence", phase="learn"):
    """Use these working columns from now on, and sum the evidence.

    ``varying`` are the terms that vary by client. ``inverse (d, d)`` is the inverse of ``X'X`` of all rows of all nodes.
    """

    columns: WorkingColumns
    varying: tuple[int, ...]
    inverse: Floats

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
            residual = ResidualEvidence(0.0, np.zeros((0, 0)), np.zeros(0), 0)  # there is no residual to identify
        ones, rows = segment_sum(data.y, data.client_ptr), data.rows_per_client.astype(np.float64)
        return Evidence(
            Quadratic(*(tree.sum_up(part) for part in (losses.C, losses.r, losses.c, losses.n))),
            (losses.C**2).sum(axis=0),
            int((losses.n > 1).sum()),
            n_not_proportional(losses.C, _ROUNDING),
            n_not_proportional(self.columns.losses_to_user_units(losses).C, _PROPORTIONAL),
            _n_not_determined(losses.C, self.inverse),
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


def _n_not_determined(A: Floats, inverse: Floats) -> Floats:
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


# The coordinator


def check_rank(gram: Floats, terms: Sequence[str]) -> None:
    """Raise an error if a term is a linear combination of others, so that its global coefficient is not identifiable."""
    size = np.sqrt(np.maximum(np.diag(gram), 0.0))
    for a in np.flatnonzero(size == 0).tolist():
        raise DataError(f"The term {terms[a]!r} is zero in every row, so its coefficient cannot be estimated; leave it out.")
    values, vectors = np.linalg.eigh(gram / (size[:, None] * size))
    if values[0] > len(gram) * 1e-12 * values[-1]:
        return
    involved = [terms[a] for a in np.flatnonzero(np.abs(vectors[:, 0]) > 1e-4).tolist()]
    raise DataError(
        f"The terms {listing(involved, 5)} are linearly dependent, so their coefficients are not identifiable; leave out "
        f"{involved[-1]!r}, or centre columns whose spread is small beside their mean."
    )


def check_identifiable(network: CountingNetwork, evidence: Evidence, shape: Shape, *, squares: float | None = None) -> None:
    """Raise an error if this data cannot identify the variances of a shape.

    ``squares`` is the sum of squared responses of a linear model, which has a residual variance to identify too.
    """
    linear, terms = squares is not None, network.terms
    sums = evidence.cluster_sums
    _refuse_too_few(network, evidence, shape, linear)
    clusters = n_not_proportional(sums.C, _ROUNDING), _n_not_determined(sums.C, invert(sums.C.sum(axis=0))[0])
    for (level, varying, kind), (not_proportional, not_determined) in zip(
        _levels(shape), ((evidence.not_proportional, evidence.not_determined), clusters), strict=True
    ):
        if kind != "isotropic" and evidence.n_several_rows:
            _refuse_proportional(not_proportional, varying, terms, level)
        _refuse_determined(not_determined, varying, terms, level)
    if squares is not None:
        residual = evidence.residual if shape.client else ResidualEvidence.of(sums, shape.cluster)
        _refuse_no_residual(residual, float(sums.n.sum()), 2 * float(sums.c.sum()), squares)
    if linear and shape.client:
        _refuse_dependent(evidence, terms, shape)


def _levels(shape: Shape) -> list[tuple[str, tuple[int, ...], Kind]]:
    return [("client", shape.client, shape.client_kind), ("cluster", shape.cluster, shape.cluster_kind)]


def _refuse_too_few(network: CountingNetwork, evidence: Evidence, shape: Shape, linear: bool) -> None:
    """Too few rows for the terms, or levels whose groups have one client or one row each."""
    tree, terms = network.tree, network.terms
    rows = float(evidence.cluster_sums.n.sum())
    if rows <= len(terms):
        raise DataError(f"There are {rows:.0f} rows for {len(terms)} global coefficients; add rows, or leave out terms.")
    if shape.client and shape.cluster and (tree.sizes <= 1).all():
        raise DataError(
            "Every cluster has one client, so variation between clients cannot be separated from variation between clusters; "
            "leave out cluster= (or the cluster's part of the formula)."
        )
    if shape.client and not evidence.n_several_rows and linear and _all_clients_alike(network, evidence, shape):
        raise DataError(
            "Every client has one row, so variation between clients cannot be separated from the residual; add rows, or "
            "let no term vary by client."
        )
    if shape.per_cluster and shape.client and (tree.sizes == 1).any():
        cluster = tree.clusters.tolist()[int((tree.sizes == 1).argmax())]
        raise DataError(
            f"Cluster {cluster!r} has one client, so a covariance of its clients cannot be estimated; leave out per_cluster=, "
            "or the cluster."
        )
    if shape.client_kind == "full" and len(shape.client) > 1 and rows <= len(shape.client) * tree.n_clients:
        raise DataError(
            f"There are {rows:.0f} rows for {len(shape.client) * tree.n_clients} random coefficients of clients, so their full "
            "covariance is probably not identifiable; let fewer terms vary by client, or set covariance='diagonal'."
        )


def _all_clients_alike(network: CountingNetwork, evidence: Evidence, shape: Shape) -> bool:
    """Whether ``x'x`` over the varying terms is the same for every client, so that their variance acts like the residual's."""
    mean = np.diag(evidence.cluster_sums.C.sum(axis=0))[list(shape.client)] / network.tree.n_clients
    if shape.client_kind == "isotropic":
        mean = mean.sum(keepdims=True)
    return network.ask(CountUnlike(shape.client, mean)).number == 0


def _refuse_proportional(not_proportional: Floats, varying: Sequence[int], terms: Sequence[str], level: str) -> None:
    """Two terms that are proportional within every client or cluster. One may be the intercept."""
    for a, b in combinations(varying, 2):
        if not_proportional[a, b]:
            continue
        other, term = sorted((terms[a], terms[b]), key=lambda name: name != "Intercept")
        what = "constant" if other == "Intercept" else f"proportional to {other!r}"
        raise DataError(
            f"The term {term!r} is {what} within every {level}, so its variation between {level}s cannot be separated from "
            f"that of {other!r}; leave it out of the terms that vary by {level} (vary=, or its bar). It keeps its global "
            "coefficient."
        )


def _refuse_determined(not_determined: Floats, varying: Sequence[int], terms: Sequence[str], level: str) -> None:
    """Global coefficients that determine those of every client or cluster, such as dummies of their names."""
    for term in (terms[a] for a in varying if not not_determined[a]):
        raise DataError(
            f"The fixed effects already give every {level} its own coefficient of {term!r}, so its variance between {level}s "
            f"is not identifiable; leave the {level} column out of the fixed effects, or {term!r} out of the bar."
        )


def check_classes(evidence: Evidence, shape: Shape) -> None:
    """Raise an error if every client, or every cluster, has rows of one class only: its variance has no finite estimate."""
    ones, rows = evidence.cluster_ones, evidence.cluster_rows
    n_clusters = int(((ones != 0) & (ones != rows)).sum())
    for level, varying, n_both in (("client", shape.client, evidence.n_both_classes), ("cluster", shape.cluster, n_clusters)):
        if varying and not n_both:
            single = level == "client" and not evidence.n_repeated
            many = "Every client has one row" if single else f"No {level} has rows of both classes"
            raise DataError(
                f"{many}, so variation between {level}s has no finite estimate; add rows, or let no term vary by {level}."
            )


def _refuse_no_residual(evidence: ResidualEvidence, rows: float, total: float, squares: float) -> None:
    """A residual that is rounding only: the clients' separate fits, or the global terms alone, are perfect."""
    shared = len(evidence.rhs)
    rest = evidence.within - (float(evidence.rhs @ solve_symmetric(evidence.common, evidence.rhs)) if shared else 0.0)
    free = rows - evidence.rank - shared
    if total <= 1e-24 * squares or (free > 0 and rest <= 1e-14 * total):
        raise DataError(
            "The residual variance is zero: the terms fit the response exactly, overall or within every client or cluster, so "
            "no variance can be estimated; look for a constant response or terms that determine it, or leave out the bars and "
            "give gamma."
        )


def _refuse_dependent(evidence: Evidence, terms: Sequence[str], shape: Shape) -> None:
    """A combination of the variances that leaves the covariance of all responses unchanged."""
    gram, labels = _inner_products(evidence, terms, shape)
    size = np.sqrt(np.diag(gram))
    values, vectors = np.linalg.eigh(gram / (size[:, None] * size))
    if values[0] > 1e-9:
        return
    involved = [labels[a] for a in np.flatnonzero(np.abs(vectors[:, 0]) > 1e-3)]
    raise DataError(
        f"There are more varying terms than this data can identify: the variances of {listing(involved, 4)} cannot be "
        "separated; let fewer terms vary (vary=, or the bar), or add rows."
    )


def _inner_products(evidence: Evidence, terms: Sequence[str], shape: Shape) -> tuple[Floats, list[str]]:
    """The inner products of the matrices of the residual and of the variances, and a label for each matrix."""
    c, w, A = list(shape.client), list(shape.cluster), evidence.cluster_sums.C
    squares, cluster_squares, diagonal = evidence.gram_squares, (A**2).sum(axis=0), np.diag(A.sum(axis=0))
    # A client's matrix and its cluster's share the client's block, so their inner product is a sum over clients too.
    inner = np.block([[squares[np.ix_(c, c)], squares[np.ix_(c, w)]], [squares[np.ix_(w, c)], cluster_squares[np.ix_(w, w)]]])
    traces = np.concatenate([diagonal[c], diagonal[w]])
    gram = np.block([[np.array([[float(evidence.cluster_sums.n.sum())]]), traces[None]], [traces[:, None], inner]])

    # An isotropic level has one variance for all its terms, so their matrices are added.
    members, labels = [[0]], ["the residual"]
    for (level, varying, kind), first in zip(_levels(shape), (1, 1 + len(c)), strict=True):
        block = list(range(first, first + len(varying)))
        if kind == "isotropic" and len(varying) > 1:
            members, labels = [*members, block], [*labels, f"between {level}s"]
        else:
            members += [[at] for at in block]
            labels += [f"{terms[a]} between {level}s" for a in varying]
    added = np.zeros((len(members), len(gram)))
    for row, columns in enumerate(members):
        added[row, columns] = 1.0
    return added @ gram @ added.T, labels


def survey(network: Network, shape: Shape, *, check: bool = True) -> Survey:
    """Ask the nodes. With ``check``, raise an error if this data cannot identify the variances."""
    counting, terms, linear = CountingNetwork(network), network.terms, network.loss.reml
    with threads_of(network):
        columns, totals = choose_columns(counting, shape)
        check_rank(totals.gram, terms)
        inverse = invert(totals.gram)[0]
        if linear:
            # About the pooled fit, so that sums of squares are of residuals and lose no digits to a large mean.
            columns = replace(columns, origin=inverse @ totals.rhs)
        evidence = counting.ask(WeighEvidence(columns, shape.client, inverse))
        if check:
            check_identifiable(counting, evidence, shape, squares=totals.response_squares if linear else None)
        if check and network.loss.two_classes:
            check_classes(evidence, shape)
        middle = np.zeros(len(terms)) if linear else pooled(counting)
        constant = _constant_within(evidence, columns, terms)
    return Survey(counting, columns, evidence.cluster_sums, totals.log_weights, middle, constant, totals)


def _constant_within(evidence: Evidence, columns: WorkingColumns, terms: Sequence[str]) -> Anything:
    """Which terms are proportional to the intercept within every cluster, and within every client, ``(2, d)``."""
    if "Intercept" not in terms:
        return np.zeros((2, len(terms)), dtype=bool)
    one = terms.index("Intercept")
    clusters = n_not_proportional(columns.losses_to_user_units(evidence.cluster_sums).C, _PROPORTIONAL)
    return np.stack([clusters[one] == 0, evidence.clearly_not_proportional[one] == 0])


def pooled(network: CountingNetwork) -> Floats:
    """The coefficients ``(d,)`` of one model for all rows. It is an error if some coefficient has no finite estimate."""
    k, d = network.tree.n_clusters, len(network.terms)
    S, order, wbar = np.zeros((1, d, d)), TermOrder(np.arange(d), 0), np.zeros(d)
    if network.loss.linear_start:
        seen = network.ask(SumLogCounts(S, order, wbar))
        wbar = solve_symmetric(seen.C.sum(axis=0), seen.r.sum(axis=0))
    top = UpperLevels(np.tile(wbar, (k, 1)), np.zeros((k, d)), wbar)
    begin, above = BeginMode(S, order, top.w, True), Spread.of_covariances(S, k, 0)
    top, _, runaway, _ = run_newton(network, begin, top, above, tol=1e-8, max_iter=100)
    if runaway.any() and network.loss.curvature[0] == 0.0:
        along = listing(np.array(network.terms)[runaway].tolist(), 3)
        raise DataError(
            f"The terms {along} separate the responses perfectly, so some coefficient has no finite estimate; drop terms, "
            "merge categories, or set gamma= and ridge=."
        )
    return top.wbar
