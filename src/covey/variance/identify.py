"""Whether the data can tell the levels apart at all; if not, the sentence that says which level to drop.

The covariance of the responses is a sum ``V = s2 I + sum_a s_a Z_a Z_a'`` with one matrix for each variance. They can be told
apart if no matrix is a combination of the others, which their inner products show: ``<Z_a Z_a', Z_b Z_b'>`` is the sum over
groups of squared entries of ``X'X``, so it, too, comes from sums over clients. All that is asked of a single client is whether
something holds for it, and what is sent is of how many it does.

    coordinator   sends   the frame of all sums, the terms that vary by client, and (X'X)^-1 of all rows
    node          sends   Evidence: sums over its clients, in all and for each cluster, and counts of clients
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from covey._typing import Floats
from covey.errors import DataError, listing
from covey.losses import loss_of
from covey.nodes.messages import Message
from covey.nodes.network import Network
from covey.nodes.node import Node
from covey.records import Count, Reply
from covey.solvers.direct.elimination import Quadratic, solve_symmetric
from covey.tree.hierarchy import segment_sum
from covey.variance.frame import WorkingColumns, rows_at, units_at
from covey.variance.gaussian import invert
from covey.variance.structure import Shape

_TINY = 1e-13
_ALIKE = 1e-12  # beside the mean of what is alike, itself rounded
_KNOWN = 1e-8
FLAT = 1e-10  # what is proportional but for this is so for all purposes of degrees of freedom
_BLOCK = 1 << 12  # units whose matrices exist at the same time


# The node


@dataclass(frozen=True)
class ResidualEvidence(Reply):
    """What is left if each unit has its own coefficients of the varying terms, and all share the others.

    ``within`` is the sum of squares about the units' own fits, ``common (s, s)`` and ``pull (s,)`` are the normal equations
    of the shared terms that remain, ``rank`` is the number of coefficients of the units' own.
    """

    within: float
    common: Floats
    pull: Floats
    rank: int

    @classmethod
    def nothing(cls) -> ResidualEvidence:
        """Of a model without a residual."""
        return cls(0.0, np.zeros((0, 0)), np.zeros(0), 0)

    @classmethod
    def of(cls, units: Quadratic, varying: Sequence[int]) -> ResidualEvidence:
        own = list(varying)
        shared = [a for a in range(units.r.shape[1]) if a not in own]
        Avv, Avs, bv = units.C[:, own][:, :, own], units.C[:, own][:, :, shared], units.r[:, own]
        into = [solve_symmetric(Avv, Avs[:, :, a]) if own else bv for a in range(len(shared))]
        alone = solve_symmetric(Avv, bv) if own else bv
        within = 2 * units.c - np.einsum("iv,iv->i", bv, alone)
        common = units.C[:, shared][:, :, shared].sum(axis=0)
        common -= np.array([np.einsum("iva,iv->a", Avs, each) for each in into]).reshape(common.shape)
        pull = (units.r[:, shared] - np.einsum("iva,iv->ia", Avs, alone)).sum(axis=0)
        rank = int(np.linalg.matrix_rank(Avv, hermitian=True).sum()) if own else 0
        return cls(float(within.sum()), common, pull, rank)


@dataclass(frozen=True)
class Evidence(Reply):
    """what tells levels apart, in sums over a node's clients.

    Attributes
    ----------
    above : each cluster's sums of its clients' losses about the origin (of counts and classes: ``X'X`` only)
    squares : (d, d) sums of squared entries of the clients' ``X'X``
    several : how many clients have more than one row that counts
    apart, bent : (d, d) for how many clients two terms are not proportional, to rounding and by more than that
    unknown : (d,) for how many clients the common coefficients do not already tell what a term's own would
    left : what would be left of a linear model in which clients have coefficients of their own
    mixed, repeated : how many clients have rows of both classes, and more than one row
    ones, rows : (k,) each cluster's rows of class 1, and all of them
    """

    above: Quadratic
    squares: Floats
    several: int
    apart: Floats
    bent: Floats
    unknown: Floats
    left: ResidualEvidence
    mixed: int
    repeated: int
    ones: Floats
    rows: Floats


@dataclass(frozen=True)
class WeighEvidence(Message[Evidence], label="weigh evidence", phase="learn"):
    """see your rows in this frame from now on, and tell what there is to tell levels apart by.

    ``varying`` are the terms that vary by client, ``inverse (d, d)`` is that of ``X'X`` of the rows of all nodes.
    """

    frame: WorkingColumns
    varying: tuple[int, ...]
    inverse: Floats

    def at(self, node: Node) -> Evidence:
        node.keep(self.frame)
        data, tree = rows_at(node), node.data.hierarchy
        if node.loss.reml:
            units = units_at(node)
            left = ResidualEvidence.of(units, self.varying)
        else:
            n, d = data.n_clients, data.n_terms
            gram = loss_of("gaussian").hessian(data, np.zeros((n, d)))
            units, left = Quadratic(gram, np.zeros((n, d)), np.zeros(n), data.rows_that_count), ResidualEvidence.nothing()
        ones, rows = segment_sum(data.y, data.client_ptr), data.rows_per_client.astype(np.float64)
        return Evidence(
            Quadratic(*(tree.sum_up(each) for each in (units.C, units.r, units.c, units.n))),
            (units.C**2).sum(axis=0),
            int((units.n > 1).sum()),
            bent(units.C, _TINY),
            bent(self.frame.sums_told(units).C, FLAT),
            _unknown(units.C, self.inverse),
            left,
            int(((ones != 0) & (ones != rows)).sum()),
            int((rows > 1).sum()),
            tree.sum_up(ones),
            tree.sum_up(rows),
        )


def bent(A: Floats, limit: float) -> Floats:
    """For how many units two terms are not proportional, but for a share ``limit``: ``(d, d)``."""
    count = np.zeros(A.shape[1:])
    for start in range(0, len(A), _BLOCK):
        own = A[start : start + _BLOCK]
        size = np.einsum("iaa->ia", own)
        full = size[:, :, None] * size[:, None, :]
        count += (full - own**2 > limit * np.maximum(full, 1e-300)).sum(axis=0)
    return count


def _unknown(A: Floats, inverse: Floats) -> Floats:
    """For how many units the common coefficients do not tell all of a term, ``(d,)``."""
    count = np.zeros(A.shape[1])
    for start in range(0, len(A), _BLOCK):
        block = A[start : start + _BLOCK]
        own, fitted = np.einsum("iaa->ia", block), np.einsum("iac,iac->ic", block, inverse @ block)
        count += (own - fitted > _KNOWN * own).sum(axis=0)
    return count


@dataclass(frozen=True)
class CountUnlike(Message[Count], label="clients unlike the others", phase="learn"):
    """for how many of your clients is ``x'x`` over the terms not as in ``mean``, that over all clients?

    ``mean`` has one value for each term, or one for their sum.
    """

    varying: tuple[int, ...]
    mean: Floats

    def at(self, node: Node) -> Count:
        size = np.einsum("iaa->ia", units_at(node).C)[:, list(self.varying)]
        total = size if len(self.mean) == size.shape[1] else size.sum(axis=1, keepdims=True)
        return Count(int((np.abs(total - self.mean) > _ALIKE * np.abs(self.mean)).any(axis=1).sum()))


# The coordinator


def check_rank(gram: Floats, terms: Sequence[str]) -> None:
    """Refuse terms that are combinations of others: no global coefficient is theirs alone."""
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


def check_told_apart(
    network: Network,
    found: Evidence,
    shape: Shape,
    *,
    squares: float | None = None,
) -> None:
    """Refuse a structure whose levels this data cannot tell from each other.

    A linear model has a residual to be told apart too; ``squares`` is then the sum of squared responses.
    """
    tree, terms = network.tree, network.terms
    rows, residual = float(found.above.n.sum()), squares is not None
    if rows <= len(terms):
        raise DataError(f"There are {rows:.0f} rows for {len(terms)} common coefficients; add rows, or leave out terms.")
    if shape.client and shape.cluster and (tree.sizes <= 1).all():
        raise DataError(
            "Every cluster has one client, so variation between clients cannot be told from variation between clusters; "
            "leave out cluster= (or the cluster's part of the formula)."
        )
    if shape.client and not found.several and residual and _one_size(network, found, shape):
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
    A = found.above.C
    told_above = bent(A, _TINY), _unknown(A, invert(A.sum(axis=0))[0])
    for level, varying, kind, (apart, unknown) in (
        ("client", shape.client, shape.client_kind, (found.apart, found.unknown)),
        ("cluster", shape.cluster, shape.cluster_kind, told_above),
    ):
        if kind != "isotropic" and found.several:
            _refuse_constant(apart, varying, terms, level)
        _refuse_known(unknown, varying, terms, level)
    if squares is not None:
        left = found.left if shape.client else ResidualEvidence.of(found.above, shape.cluster)
        _refuse_no_residual(left, rows, 2 * float(found.above.c.sum()), squares)
    if residual and shape.client:
        _refuse_dependent(found, terms, shape)


def _one_size(network: Network, found: Evidence, shape: Shape) -> bool:
    """Whether ``x'x`` over the varying terms is the same in every row, so that their variance looks like the residual's."""
    mean = np.diag(found.above.C.sum(axis=0))[list(shape.client)] / network.tree.n_clients
    if shape.client_kind == "isotropic":
        mean = mean.sum(keepdims=True)
    return network.ask(CountUnlike(shape.client, mean)).number == 0


def _refuse_constant(apart: Floats, varying: Sequence[int], terms: Sequence[str], level: str) -> None:
    """Two terms that are proportional within every unit (one may be the intercept) are one coefficient there, not two."""
    for a, b in combinations(varying, 2):
        if apart[a, b]:
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


def _refuse_known(unknown: Floats, varying: Sequence[int], terms: Sequence[str], level: str) -> None:
    """Common coefficients that already tell every unit apart, such as those of the units' own names, leave nothing to vary."""
    for a in varying:
        if not unknown[a]:
            raise DataError(
                f"The common coefficients already tell every {level} apart, so variation of {terms[a]!r} between {level}s "
                f"cannot be told from them; leave the {level}s' names out of the common terms, or {terms[a]!r} out of the bar."
            )


def check_classes(found: Evidence, shape: Shape) -> None:
    """Refuse classes that are the same throughout every client, or every cluster: their spread has no finite estimate."""
    mixed = int(((found.ones != 0) & (found.ones != found.rows)).sum())
    for level, varying, units in (("client", shape.client, found.mixed), ("cluster", shape.cluster, mixed)):
        if varying and not units:
            many = (
                "Every client has one row"
                if level == "client" and not found.repeated
                else f"No {level} has rows of both classes"
            )
            raise DataError(
                f"{many}, so variation between {level}s has no finite estimate; add rows, or let no term vary by {level}."
            )


def _refuse_no_residual(left: ResidualEvidence, rows: float, total: float, squares: float) -> None:
    """No more is left than rounding, with rows to spare or with all of it in the common terms."""
    shared = len(left.pull)
    rest = left.within - (float(left.pull @ solve_symmetric(left.common, left.pull)) if shared else 0.0)
    free = rows - left.rank - shared
    if total <= 1e-24 * squares or (free > 0 and rest <= 1e-14 * total):
        raise DataError(
            "The residual variance is zero: within every client the response is an exact linear function of the terms, so "
            "clients' own fits are perfect and no penalty is learned; drop the term that equals the response, or set gamma."
        )


def _refuse_dependent(found: Evidence, terms: Sequence[str], shape: Shape) -> None:
    """Find a combination of the variances that leaves the covariance of all responses as it is."""
    above = found.above.C
    squares, squares_above = found.squares, (above**2).sum(axis=0)
    c, w = list(shape.client), list(shape.cluster)
    inner = np.block([[squares[np.ix_(c, c)], squares[np.ix_(c, w)]], [squares[np.ix_(w, c)], squares_above[np.ix_(w, w)]]])
    sums = np.concatenate([np.diag(above.sum(axis=0))[c], np.diag(above.sum(axis=0))[w]])
    gram = np.block([[np.array([[float(found.above.n.sum())]]), sums[None]], [sums[:, None], inner]])
    pool = [np.array([0])]
    at = 1
    for varying, kind in ((c, shape.client_kind), (w, shape.cluster_kind)):
        block = np.arange(at, at + len(varying))
        pool += [block] if kind == "isotropic" and len(varying) else [np.array([each]) for each in block]
        at += len(varying)
    gather = np.zeros((len(pool), len(gram)))
    for row, members in enumerate(pool):
        gather[row, members] = 1.0
    gram = gather @ gram @ gather.T
    size = np.sqrt(np.diag(gram))
    values, vectors = np.linalg.eigh(gram / (size[:, None] * size))
    if values[0] > 1e-9:
        return
    names = [
        "the residual",
        *(f"{terms[a]} between clients" for a in c),
        *(f"{terms[a]} between clusters" for a in w),
    ]
    labels = [names[members[0]] if len(members) == 1 else names[members[0]].split(" ", 1)[1] for members in pool]
    involved = [labels[a] for a in np.flatnonzero(np.abs(vectors[:, 0]) > 1e-3)]
    raise DataError(
        f"There are more varying terms than this data can identify: the variances of {listing(involved, 4)} cannot be told "
        "apart; let fewer terms vary (vary=, or the bar), or add rows."
    )
