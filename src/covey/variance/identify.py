"""Whether the data can tell the levels apart at all; if not, the sentence that says which level to drop.

The covariance of the responses is a sum ``V = s2 I + sum_a s_a Z_a Z_a'`` with one matrix for each variance. They can be told
apart if no matrix is a combination of the others, which their inner products show: ``<Z_a Z_a', Z_b Z_b'>`` is the sum over
groups of squared entries of ``X'X``, so it, too, comes from sums over clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from covey._typing import Floats
from covey.data import GroupedData
from covey.errors import DataError, listing
from covey.hierarchy import Hierarchy, segment_sum
from covey.solvers.elimination import Quadratic, solve_symmetric
from covey.variance.gaussian import invert
from covey.variance.structure import Shape

_TINY = 1e-13


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
    units: Quadratic,
    tree: Hierarchy,
    terms: Sequence[str],
    shape: Shape,
    *,
    squares: float | None = None,
) -> None:
    """Refuse a structure whose levels this data cannot tell from each other.

    A linear model has a residual to be told apart too; ``squares`` is then the sum of squared responses.
    """
    rows, residual = units.n, squares is not None
    if rows.sum() <= len(terms):
        raise DataError(f"There are {rows.sum():.0f} rows for {len(terms)} common coefficients; add rows, or leave out terms.")
    if shape.client and shape.cluster and (tree.sizes <= 1).all():
        raise DataError(
            "Every cluster has one client, so variation between clients cannot be told from variation between clusters; "
            "leave out cluster= (or the cluster's part of the formula)."
        )
    if shape.client and (rows <= 1).all() and residual and _one_size(units.C, shape):
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
    if shape.client_kind == "full" and len(shape.client) > 1 and rows.sum() <= len(shape.client) * tree.n_clients:
        raise DataError(
            f"There are more varying terms than this data can identify: {len(shape.client)} for each of {tree.n_clients} "
            f"clients with {rows.sum():.0f} rows in all; let fewer vary by client, or set covariance='diagonal'."
        )
    for level, varying, kind in (("client", shape.client, shape.client_kind), ("cluster", shape.cluster, shape.cluster_kind)):
        A = units.C if level == "client" else tree.sum_up(units.C)
        if kind != "isotropic" and not (rows <= 1).all():
            _refuse_constant(A, varying, terms, level)
        _refuse_known(A, units.C.sum(axis=0), varying, terms, level)
    if squares is not None:
        up = Quadratic(tree.sum_up(units.C), tree.sum_up(units.r), tree.sum_up(units.c), tree.sum_up(units.n))
        _refuse_no_residual(*((units, shape.client) if shape.client else (up, shape.cluster)), squares)
    if residual and shape.client:
        _refuse_dependent(units, tree, terms, shape)


def _one_size(A: Floats, shape: Shape) -> bool:
    """Whether ``x'x`` over the varying terms is the same in every row, so that their variance looks like the residual's."""
    size = np.einsum("iaa->ia", A)[:, list(shape.client)]
    total = size.sum(axis=1) if shape.client_kind == "isotropic" else size
    return bool((np.ptp(total, axis=0) <= _TINY * np.abs(total).max(axis=0)).all())


def _refuse_constant(A: Floats, varying: Sequence[int], terms: Sequence[str], level: str) -> None:
    """Two terms that are proportional within every unit (one may be the intercept) are one coefficient there, not two."""
    for a, b in combinations(varying, 2):
        full = A[:, a, a] * A[:, b, b]
        if (full - A[:, a, b] ** 2 > _TINY * np.maximum(full, 1e-300)).any():
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


def _refuse_known(A: Floats, gram: Floats, varying: Sequence[int], terms: Sequence[str], level: str) -> None:
    """Common coefficients that already tell every unit apart, such as those of the units' own names, leave nothing to vary."""
    inverse, _ = invert(gram)
    for a in varying:
        fitted = np.einsum("ia,ab,ib->i", A[:, :, a], inverse, A[:, :, a])
        if (A[:, a, a] - fitted <= 1e-8 * A[:, a, a]).all():
            raise DataError(
                f"The common coefficients already tell every {level} apart, so variation of {terms[a]!r} between {level}s "
                f"cannot be told from them; leave the {level}s' names out of the common terms, or {terms[a]!r} out of the bar."
            )


def check_classes(data: GroupedData, shape: Shape) -> None:
    """Refuse classes that are the same throughout every client, or every cluster: their spread has no finite estimate."""
    tree = data.hierarchy
    share, rows = segment_sum(data.y, data.client_ptr), data.rows_per_client
    for level, varying, ones, count in (
        ("client", shape.client, share, rows),
        ("cluster", shape.cluster, tree.sum_up(share), tree.sum_up(rows.astype(np.float64))),
    ):
        if varying and ((ones == 0) | (ones == count)).all():
            many = (
                "Every client has one row"
                if level == "client" and (rows <= 1).all()
                else f"No {level} has rows of both classes"
            )
            raise DataError(
                f"{many}, so variation between {level}s has no finite estimate; add rows, or let no term vary by {level}."
            )


def _refuse_no_residual(units: Quadratic, varying: Sequence[int], squares: float) -> None:
    """What is left if each unit has its own coefficients of the varying terms, and all share the others."""
    own = list(varying)
    shared = [a for a in range(units.r.shape[1]) if a not in own]
    Avv, Avs, bv = units.C[:, own][:, :, own], units.C[:, own][:, :, shared], units.r[:, own]
    into = [solve_symmetric(Avv, Avs[:, :, a]) if own else bv for a in range(len(shared))]
    alone = solve_symmetric(Avv, bv) if own else bv
    within = 2 * units.c - np.einsum("iv,iv->i", bv, alone)
    common = units.C[:, shared][:, :, shared].sum(axis=0)
    common -= np.array([np.einsum("iva,iv->a", Avs, each) for each in into]).reshape(common.shape)
    pull = (units.r[:, shared] - np.einsum("iva,iv->ia", Avs, alone)).sum(axis=0)
    left = float(within.sum()) - (float(pull @ solve_symmetric(common, pull)) if shared else 0.0)
    free = float(units.n.sum()) - float(np.linalg.matrix_rank(Avv, hermitian=True).sum() if own else 0) - len(shared)
    total = 2 * float(units.c.sum())
    if total <= 1e-24 * squares or (free > 0 and left <= 1e-14 * total):
        raise DataError(
            "The residual variance is zero: within every client the response is an exact linear function of the terms, so "
            "clients' own fits are perfect and no penalty is learned; drop the term that equals the response, or set gamma."
        )


def _refuse_dependent(units: Quadratic, tree: Hierarchy, terms: Sequence[str], shape: Shape) -> None:
    """Find a combination of the variances that leaves the covariance of all responses as it is."""
    above = tree.sum_up(units.C)
    squares, squares_above = (units.C**2).sum(axis=0), (above**2).sum(axis=0)
    c, w = list(shape.client), list(shape.cluster)
    inner = np.block([[squares[np.ix_(c, c)], squares[np.ix_(c, w)]], [squares[np.ix_(w, c)], squares_above[np.ix_(w, w)]]])
    sums = np.concatenate([np.diag(above.sum(axis=0))[c], np.diag(above.sum(axis=0))[w]])
    gram = np.block([[np.array([[float(units.n.sum())]]), sums[None]], [sums[:, None], inner]])
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
