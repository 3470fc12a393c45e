"""Whether the variances are identifiable from this data; if not, an error that says what to leave out.

The covariance of the responses is a sum ``V = s2 I + sum_a s_a Z_a Z_a'`` with one matrix for each variance. The variances are
identifiable if no matrix is a linear combination of the others. Their inner products show that: ``<Z_a Z_a', Z_b Z_b'>`` is the
sum over groups of squared entries of ``X'X``, so it comes from sums over clients. Of a single client a node finds out whether
some property holds, and sends only the number of clients for which it does.

    coordinator   sends   the working columns, the terms that vary by client, and (X'X)^-1 of all rows
    node          sends   Evidence: sums over its clients, in all and for each cluster, and numbers of clients

What the coordinator asks of all nodes before any search: totals, working columns, and whether levels are identifiable.

The answers do not depend on which levels vary, so a fit and the fits that test it share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from covey._typing import Anything, Floats
from covey.errors import DataError, listing
from covey.losses import loss_of
from covey.nodes.network import InMemory, Message, Network, Node
from covey.records import Count, Reply
from covey.solvers.direct.elimination import Quadratic, solve_symmetric
from covey.tables.rows import GroupedData
from covey.tree.hierarchy import Hierarchy, segment_sum
from covey.variance.columns import (
    ClientSums,
    CountingNetwork,
    RowTotals,
    WorkingColumns,
    choose_columns,
    client_losses,
    client_rows,
    threads_of,
    use_sums,
)
from covey.variance.components import Shape
from covey.variance.laplace_likelihood import pooled
from covey.variance.linear_likelihood import invert

_ROUNDING = 1e-13
_ALIKE = 1e-12  # relative to a mean that is itself rounded
_DETERMINED = 1e-8
PROPORTIONAL = 1e-10  # columns that are proportional to this precision are so for degrees of freedom
_BLOCK = 1 << 12  # clients whose matrices are in memory at the same time


# The node


@dataclass(frozen=True)
class ResidualEvidence(Reply):
    """What remains if each client has its own coefficients of the varying terms, and all share the others.

    Attributes
    ----------
    within : the sum of squares about the clients' own fits
    common, rhs : (s, s) and (s,), the normal equations of the shared terms after these fits
    rank : the number of coefficients in the clients' own fits
    """

    within: float
    common: Floats
    rhs: Floats
    rank: int

    @classmethod
    def nothing(cls) -> ResidualEvidence:
        """For a model without a residual."""
        return cls(0.0, np.zeros((0, 0)), np.zeros(0), 0)

    @classmethod
    def of(cls, losses: Quadratic, varying: Sequence[int]) -> ResidualEvidence:
        v = list(varying)
        shared = [a for a in range(losses.r.shape[1]) if a not in v]
        Avv, Avs, bv = losses.C[:, v][:, :, v], losses.C[:, v][:, :, shared], losses.r[:, v]
        into = [solve_symmetric(Avv, Avs[:, :, a]) if v else bv for a in range(len(shared))]
        fits = solve_symmetric(Avv, bv) if v else bv
        within = 2 * losses.c - np.einsum("iv,iv->i", bv, fits)
        common = losses.C[:, shared][:, :, shared].sum(axis=0)
        common -= np.array([np.einsum("iva,iv->a", Avs, each) for each in into]).reshape(common.shape)
        rhs = (losses.r[:, shared] - np.einsum("iva,iv->ia", Avs, fits)).sum(axis=0)
        rank = int(np.linalg.matrix_rank(Avv, hermitian=True).sum()) if v else 0
        return cls(float(within.sum()), common, rhs, rank)


@dataclass(frozen=True)
class Evidence(Reply):
    """What identifies the variances, in sums over a node's clients.

    Attributes
    ----------
    cluster_sums : each cluster's sum of its clients' losses about the origin (for counts and classes ``X'X`` only)
    gram_squares : (d, d) sums of squared entries of the clients' ``X'X``
    n_several_rows : the number of clients with more than one row of positive weight
    not_proportional : (d, d) the number of clients within which two terms are not proportional, beyond rounding
    clearly_not_proportional : the same for the user's columns, to the precision ``PROPORTIONAL``
    not_determined : (d,) the number of clients whose coefficient of a term the common coefficients do not determine
    residual : what remains of a linear model in which clients have their own coefficients
    n_both_classes, n_repeated : the number of clients with rows of both classes, and with more than one row
    cluster_ones, cluster_rows : (k,) each cluster's rows of class 1, and all of them
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

    ``varying`` are the terms that vary by client; ``inverse (d, d)`` is that of ``X'X`` of the rows of all nodes.
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
            residual = ResidualEvidence.nothing()
        ones, rows = segment_sum(data.y, data.client_ptr), data.rows_per_client.astype(np.float64)
        return Evidence(
            Quadratic(*(tree.sum_up(each) for each in (losses.C, losses.r, losses.c, losses.n))),
            (losses.C**2).sum(axis=0),
            int((losses.n > 1).sum()),
            n_not_proportional(losses.C, _ROUNDING),
            n_not_proportional(self.columns.losses_to_user_units(losses).C, PROPORTIONAL),
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
    """Count the clients whose ``x'x`` over the varying terms differs from ``mean``, that over all clients.

    ``mean`` has one value for each term, or one for their sum.
    """

    varying: tuple[int, ...]
    mean: Floats

    def at(self, node: Node) -> Count:
        size = np.einsum("iaa->ia", client_losses(node).C)[:, list(self.varying)]
        total = size if len(self.mean) == size.shape[1] else size.sum(axis=1, keepdims=True)
        return Count(int((np.abs(total - self.mean) > _ALIKE * np.abs(self.mean)).any(axis=1).sum()))


# The coordinator


def check_rank(gram: Floats, terms: Sequence[str]) -> None:
    """Refuse terms that are linear combinations of others: their common coefficients are not identifiable."""
    size = np.sqrt(np.maximum(np.diag(gram), 0.0))
    for a in np.flatnonzero(size == 0).tolist():
        raise DataError(f"The term {terms[a]!r} is zero in every row, so it has no coefficient to learn; leave it out.")
    values, vectors = np.linalg.eigh(gram / (size[:, None] * size))
    if values[0] > len(gram) * 1e-12 * values[-1]:
        return
    involved = [terms[a] for a in np.flatnonzero(np.abs(vectors[:, 0]) > 1e-4).tolist()]
    raise DataError(
        f"The terms {listing(involved, 5)} are linear combinations of each other, so their coefficients cannot be told apart; "
        f"leave out {involved[-1]!r}, or centre what varies little beside its size."
    )


def check_identifiable(network: Network, evidence: Evidence, shape: Shape, *, squares: float | None = None) -> None:
    """Refuse a structure whose variances this data cannot tell apart.

    A linear model has a residual variance to identify too; ``squares`` is then the sum of squared responses.
    """
    linear, terms = squares is not None, network.terms
    rows = float(evidence.cluster_sums.n.sum())
    _refuse_too_few(network, evidence, shape, linear)
    A = evidence.cluster_sums.C
    clusters = n_not_proportional(A, _ROUNDING), _n_not_determined(A, invert(A.sum(axis=0))[0])
    for level, varying, kind, (not_proportional, not_determined) in (
        ("client", shape.client, shape.client_kind, (evidence.not_proportional, evidence.not_determined)),
        ("cluster", shape.cluster, shape.cluster_kind, clusters),
    ):
        if kind != "isotropic" and evidence.n_several_rows:
            _refuse_proportional(not_proportional, varying, terms, level)
        _refuse_determined(not_determined, varying, terms, level)
    if squares is not None:
        residual = evidence.residual if shape.client else ResidualEvidence.of(evidence.cluster_sums, shape.cluster)
        _refuse_no_residual(residual, rows, 2 * float(evidence.cluster_sums.c.sum()), squares)
    if linear and shape.client:
        _refuse_dependent(evidence, terms, shape)


def _refuse_too_few(network: Network, evidence: Evidence, shape: Shape, linear: bool) -> None:
    """Too few rows for the terms, or levels with one client or row each."""
    tree, terms = network.tree, network.terms
    rows = float(evidence.cluster_sums.n.sum())
    if rows <= len(terms):
        raise DataError(f"There are {rows:.0f} rows for {len(terms)} common coefficients; add rows, or leave out terms.")
    if shape.client and shape.cluster and (tree.sizes <= 1).all():
        raise DataError(
            "Every cluster has one client, so variation between clients cannot be told from variation between clusters; "
            "leave out cluster= (or the cluster's part of the formula)."
        )
    if shape.client and not evidence.n_several_rows and linear and _all_clients_alike(network, evidence, shape):
        raise DataError(
            "Every client has one row, so variation between clients cannot be told from the residual; add rows, or "
            "let no term vary by client."
        )
    if shape.per_cluster and shape.client and (tree.sizes == 1).any():
        lonely = tree.clusters.tolist()[int((tree.sizes == 1).argmax())]
        raise DataError(
            f"Cluster {lonely!r} has one client, so how its clients spread cannot be told from the cluster's own place; leave "
            "out per_cluster=, or the cluster."
        )
    if shape.client_kind == "full" and len(shape.client) > 1 and rows <= len(shape.client) * tree.n_clients:
        raise DataError(
            f"There are more varying terms than this data can identify: {len(shape.client)} for each of {tree.n_clients} "
            f"clients with {rows:.0f} rows in all; let fewer vary by client, or set covariance='diagonal'."
        )


def _all_clients_alike(network: Network, evidence: Evidence, shape: Shape) -> bool:
    """Whether ``x'x`` over the varying terms is the same for every client, so that their variance acts as the residual's."""
    mean = np.diag(evidence.cluster_sums.C.sum(axis=0))[list(shape.client)] / network.tree.n_clients
    if shape.client_kind == "isotropic":
        mean = mean.sum(keepdims=True)
    return network.ask(CountUnlike(shape.client, mean)).number == 0


def _refuse_proportional(not_proportional: Floats, varying: Sequence[int], terms: Sequence[str], level: str) -> None:
    """Two terms that are proportional within every client or cluster have one coefficient there. One may be the intercept."""
    for a, b in combinations(varying, 2):
        if not_proportional[a, b]:
            continue
        if "Intercept" in (terms[a], terms[b]):
            term = terms[b] if terms[a] == "Intercept" else terms[a]
            what = f"The term {term!r} is constant within every {level}"
            other = "the intercept's"
        else:
            term, other = terms[b], f"that of {terms[a]!r}"
            what = f"The term {term!r} is proportional to another within every {level}"
        raise DataError(
            f"{what}, so its variation between {level}s cannot be told from {other}; leave it out of what varies by {level} "
            "(vary=, or its bar); it keeps its common coefficient."
        )


def _refuse_determined(not_determined: Floats, varying: Sequence[int], terms: Sequence[str], level: str) -> None:
    """Common coefficients that determine those of every client or cluster, such as dummies of their names."""
    for a in varying:
        if not not_determined[a]:
            raise DataError(
                f"The common coefficients already tell every {level} apart, so variation of {terms[a]!r} between {level}s "
                f"cannot be told from them; leave the {level}s' names out of the common terms, or {terms[a]!r} out of the bar."
            )


def check_classes(evidence: Evidence, shape: Shape) -> None:
    """Refuse classes that are constant within every client, or every cluster: their variance has no finite estimate."""
    ones, rows = evidence.cluster_ones, evidence.cluster_rows
    n_clusters = int(((ones != 0) & (ones != rows)).sum())
    for level, varying, n_both in (("client", shape.client, evidence.n_both_classes), ("cluster", shape.cluster, n_clusters)):
        if varying and not n_both:
            many = (
                "Every client has one row"
                if level == "client" and not evidence.n_repeated
                else f"No {level} has rows of both classes"
            )
            raise DataError(
                f"{many}, so variation between {level}s has no finite estimate; add rows, or let no term vary by {level}."
            )


def _refuse_no_residual(evidence: ResidualEvidence, rows: float, total: float, squares: float) -> None:
    """The residual is rounding only: clients' own fits, or the common terms alone, are perfect with rows to spare."""
    shared = len(evidence.rhs)
    rest = evidence.within - (float(evidence.rhs @ solve_symmetric(evidence.common, evidence.rhs)) if shared else 0.0)
    free = rows - evidence.rank - shared
    if total <= 1e-24 * squares or (free > 0 and rest <= 1e-14 * total):
        raise DataError(
            "The residual variance is zero: within every client the response is an exact linear function of the terms, so "
            "clients' own fits are perfect and no penalty is learned; drop the term that equals the response, or set gamma."
        )


def _refuse_dependent(evidence: Evidence, terms: Sequence[str], shape: Shape) -> None:
    """A linear combination of the variances that leaves the covariance of all responses unchanged."""
    gram, labels = _inner_products(evidence, terms, shape)
    size = np.sqrt(np.diag(gram))
    values, vectors = np.linalg.eigh(gram / (size[:, None] * size))
    if values[0] > 1e-9:
        return
    involved = [labels[a] for a in np.flatnonzero(np.abs(vectors[:, 0]) > 1e-3)]
    raise DataError(
        f"There are more varying terms than this data can identify: the variances of {listing(involved, 4)} cannot be told "
        "apart; let fewer terms vary (vary=, or the bar), or add rows."
    )


def _inner_products(evidence: Evidence, terms: Sequence[str], shape: Shape) -> tuple[Floats, list[str]]:
    """The inner products of the matrices of the residual and of each variance, and a label for each of these."""
    c, w, A = list(shape.client), list(shape.cluster), evidence.cluster_sums.C
    squares, cluster_squares, diagonal = evidence.gram_squares, (A**2).sum(axis=0), np.diag(A.sum(axis=0))
    # A client's matrix and a cluster's share the client's block, so their inner product is the clients' too.
    inner = np.block([[squares[np.ix_(c, c)], squares[np.ix_(c, w)]], [squares[np.ix_(w, c)], cluster_squares[np.ix_(w, w)]]])
    traces = np.concatenate([diagonal[c], diagonal[w]])
    gram = np.block([[np.array([[float(evidence.cluster_sums.n.sum())]]), traces[None]], [traces[:, None], inner]])

    # An isotropic level has one variance for all its terms: their matrices are added.
    members, labels = [[0]], ["the residual"]
    for level, varying, kind, first in (("client", c, shape.client_kind, 1), ("cluster", w, shape.cluster_kind, 1 + len(c))):
        block = list(range(first, first + len(varying)))
        if kind == "isotropic" and len(varying) > 1:
            members, labels = [*members, block], [*labels, f"between {level}s"]
        else:
            members += [[each] for each in block]
            labels += [f"{terms[a]} between {level}s" for a in varying]
    added = np.zeros((len(members), len(gram)))
    for row, columns in enumerate(members):
        added[row, columns] = 1.0
    return added @ gram @ added.T, labels


@dataclass(frozen=True)
class Survey:
    """What the coordinator knows of all rows.

    Attributes
    ----------
    network : the nodes, which use ``columns`` from now on
    columns : the working columns of all nodes
    cluster_sums : each cluster's sum of its clients' losses about the origin
    log_weights : the sum over all rows
    middle : (d,) the one model of all rows, for counts and classes; zero for a linear model
    totals, evidence : the nodes' replies; None where there are no rows
    """

    network: CountingNetwork
    columns: WorkingColumns
    cluster_sums: Quadratic
    log_weights: float
    middle: Floats
    totals: RowTotals | None = None
    evidence: Evidence | None = None

    @property
    def constant_within(self) -> Anything:
        """Which terms are constant within every cluster, and within every client, ``(2, d)``."""
        constant = np.array([term == "Intercept" for term in self.network.terms])
        if self.evidence is None or not constant.any():
            return np.stack([constant, constant])
        one = int(constant.argmax())
        clusters = n_not_proportional(self.columns.losses_to_user_units(self.cluster_sums).C, PROPORTIONAL)
        return np.stack([clusters[one] == 0, self.evidence.clearly_not_proportional[one] == 0])

    @classmethod
    def of_sums(cls, sums: ClientSums, tree: Hierarchy, terms: tuple[str, ...]) -> Survey:
        """Of a linear model of which there are only its clients' sums."""
        n, d = tree.n_clients, len(terms)
        no_rows = GroupedData(np.empty((0, d)), np.empty(0), np.zeros(n + 1, dtype=np.int64), tree, terms)
        network = InMemory.of(no_rows, loss_of("gaussian"), np.ones(n))
        use_sums(network.node, sums)
        cluster_sums = Quadratic(*(tree.sum_up(each) for each in (sums.units.C, sums.units.r, sums.units.c, sums.units.n)))
        columns = WorkingColumns(np.zeros(d), -1, sums.origin)
        return cls(CountingNetwork(network), columns, cluster_sums, sums.log_weights, np.zeros(d))


def survey(network: Network, shape: Shape, *, check: bool = True) -> Survey:
    """Ask the nodes; with ``check``, refuse levels whose variances this data cannot tell apart."""
    with threads_of(network):
        return _survey(CountingNetwork(network), shape, check)


def _survey(network: CountingNetwork, shape: Shape, check: bool) -> Survey:
    loss, terms = network.loss, network.terms
    columns, totals = choose_columns(network, shape)
    check_rank(totals.gram, terms)
    inverse, linear = invert(totals.gram)[0], loss.reml
    if linear:
        # About the pooled fit, so that sums of squares are of residuals and lose no digits to a large mean.
        columns = replace(columns, origin=inverse @ totals.rhs)
    evidence = network.ask(WeighEvidence(columns, shape.client, inverse))
    if check:
        check_identifiable(network, evidence, shape, squares=totals.response_squares if linear else None)
    if check and loss.two_classes:
        check_classes(evidence, shape)
    middle = np.zeros(len(terms)) if linear else pooled(network)
    return Survey(network, columns, evidence.cluster_sums, totals.log_weights, middle, totals, evidence)
