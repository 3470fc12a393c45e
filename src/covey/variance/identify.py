"""Questions to all nodes before a search: totals, working columns, and whether the variances are identifiable.

If they are not, :func:`survey` raises an error that says which terms to leave out.

The covariance of the responses is a sum ``V = s2 I + sum_a s_a Z_a Z_a'`` with one matrix for each variance. The variances can
be identifiable only if these matrices, ``I`` included, are linearly independent. Under REML this is necessary, not sufficient.
Their inner products decide it: ``<Z_a Z_a', Z_b Z_b'>`` is the sum over groups of squared entries of ``X'X``, so it comes from
sums over clients (:class:`.Evidence`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np

from covey._typing import Anything, Floats
from covey.errors import DataError, listing
from covey.nodes.network import Network
from covey.solvers.direct.elimination import Spread, invert, solve_symmetric
from covey.solvers.direct.newton import UpperLevels
from covey.variance.columns import CountingNetwork, RowTotals, Survey, TermOrder, WorkingColumns
from covey.variance.dependence import choose_columns
from covey.variance.evidence import (
    PROPORTIONAL,
    ROUNDING,
    CountUnlike,
    Evidence,
    GramRows,
    ResidualEvidence,
    WeighEvidence,
)
from covey.variance.laplace_likelihood import BeginMode, SumLogCounts, run_newton
from covey.variance.parameters import Kind, Shape
from covey.variance.separation import n_alike, notes_on_groups, separation


def check_rank(gram: Floats, terms: Sequence[str], free: Anything) -> None:
    """Raise an error if a ``free`` term is a linear combination of others, so that its coefficient is not identifiable."""
    gram, terms = gram[np.ix_(free, free)], [terms[a] for a in np.flatnonzero(free).tolist()]
    size = np.sqrt(np.maximum(np.diag(gram), 0.0))
    for a in np.flatnonzero(size == 0).tolist():
        raise DataError(f"The term {terms[a]!r} is zero in every row, so its coefficient cannot be estimated; leave it out.")
    values, vectors = np.linalg.eigh(gram / (size[:, None] * size))
    if not len(gram) or values[0] > len(gram) * 1e-12 * values[-1]:
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
    inverse = invert(sums.C.sum(axis=0), shape.free(np.arange(len(terms))))[0]
    rows = GramRows.of(sums.C)
    clusters = rows.n_not_proportional(ROUNDING), rows.n_not_determined(inverse)
    moments = (evidence.gram_squares, evidence.gram_products), (rows.squares(), rows.products())
    for (level, varying, kind), (not_proportional, not_determined), sizes in zip(
        _levels(shape), ((evidence.not_proportional, evidence.not_determined), clusters), moments, strict=True
    ):
        if kind != "isotropic" and evidence.n_several_rows:
            several = None if shape.per_cluster and level == "client" else sizes
            _refuse_proportional(not_proportional, varying, terms, level, kind, several)
        refuse_determined(not_determined, varying, terms, level)
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
    estimated = len(terms) - len(shape.zero)
    if rows <= estimated:
        raise DataError(f"There are {rows:.0f} rows for {estimated} global coefficients; add rows, or leave out terms.")
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


def _refuse_proportional(
    not_proportional: Floats,
    varying: Sequence[int],
    terms: Sequence[str],
    level: str,
    kind: Kind,
    moments: tuple[Floats, Floats] | None,
) -> None:
    """Two terms that are proportional within every client or cluster, if also their ratio ``m`` differs too little among these.

    One may be the intercept. The variance of a client's mean is then ``s_aa + 2 m s_ab + m^2 s_bb``, so two variances need two
    values of ``m^2``, and a covariance needs a third value of ``m``. The moments of ``m`` over clients decide.
    """
    for a, b in combinations(varying, 2):
        if not_proportional[a, b]:
            continue
        if moments is not None:
            squares, crossed = moments
            m = np.array([squares[a, a], crossed[a, b], squares[a, b], crossed[b, a], squares[b, b]])
            powers = np.array([0, 1, 2] if kind == "full" else [0, 2])
            size = np.sqrt(m[2 * powers]) if kind == "full" else np.sqrt(m[[0, 4]])
            if (size > 0).all() and np.linalg.eigvalsh(m[powers[:, None] + powers] / (size[:, None] * size))[0] > 1e-9:
                continue
        other, term = sorted((terms[a], terms[b]), key=lambda name: name != "Intercept")
        what = "constant" if other == "Intercept" else f"proportional to {other!r}"
        few = "" if moments is None else f", and {'its values' if other == 'Intercept' else 'their ratios'} are too few"
        raise DataError(
            f"The term {term!r} is {what} within every {level}{few}, so its variation between {level}s cannot be separated "
            f"from that of {other!r}; leave it out of the terms that vary by {level} (vary=, or its bar). It keeps its global "
            "coefficient."
        )


def refuse_determined(not_determined: Floats, varying: Sequence[int], terms: Sequence[str], level: str) -> None:
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
            "The terms fit the response exactly, so the residual variance is zero and no variance can be estimated. Check "
            "whether the response is constant, overall or within every client or cluster, or a term is a copy of it."
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


def survey(network: Network, shape: Shape, *, check: bool = True, settle: bool = False) -> Survey:
    """Ask the nodes, and leave out terms that other terms determine.

    With ``check``, raise an error if this data cannot identify the variances. With ``settle``, terms that are constant within
    every client or cluster do not vary there.
    """
    counting, terms, linear = CountingNetwork(network), network.terms, network.loss.reml
    columns, totals, dropped = choose_columns(counting, shape)
    shape, notes = _without_dropped(shape, dropped, totals, terms, settle)
    free = shape.free(np.arange(len(terms)))
    check_rank(totals.gram, terms, free)
    inverse = invert(totals.gram, free)[0]
    if linear:
        # About the pooled fit, so that sums of squares are of residuals and lose no digits to a large mean.
        columns = replace(columns, origin=inverse @ totals.rhs)
    evidence = counting.ask(WeighEvidence(columns, shape.client, inverse))
    if settle:
        shape, more = _without_constant(shape, evidence, columns.one, terms)
        notes += more
    if check:
        check_identifiable(counting, evidence, shape, squares=totals.response_squares if linear else None)
    if check and network.loss.two_classes:
        check_classes(evidence, shape)
    if not linear:
        clusters = n_alike(np.einsum("kaa->ka", evidence.cluster_sums.C), evidence.cluster_sums.r, network.loss)
        notes += notes_on_groups(evidence.n_one_class, clusters, shape, totals, network.tree, terms, network.loss)
    middle = np.zeros(len(terms)) if linear else pooled(counting, free)
    constant = _constant_within(evidence, columns, terms)
    return Survey(counting, columns, evidence.cluster_sums, totals.log_weights, middle, constant, totals, shape, notes)


def _without_dropped(
    shape: Shape, dropped: tuple[int, ...], totals: RowTotals, terms: Sequence[str], settle: bool
) -> tuple[Shape, tuple[str, ...]]:
    """The shape without the global coefficients of dropped terms; a column of zeros does not vary either."""
    gone = {a for a in range(len(terms)) if totals.gram[a, a] == 0 or (settle and a in dropped)}
    levels = {level: tuple(a for a in getattr(shape, level) if a not in gone) for level in ("client", "cluster")}
    shape = replace(shape, **levels, zero=tuple(sorted({*shape.zero, *dropped})))  # type: ignore[arg-type]
    if not dropped:
        return shape, ()
    named = listing([terms[a] for a in dropped], 8)
    are, have = ("is", "has") if len(dropped) == 1 else ("are", "have")
    return shape, (f"dropped: {named} {are} zero or a linear combination of the other terms, and {have} the coefficient 0",)


def _without_constant(shape: Shape, evidence: Evidence, one: int, terms: Sequence[str]) -> tuple[Shape, tuple[str, ...]]:
    """The shape without terms that are constant within every client or cluster, where the intercept varies."""
    notes: list[str] = []
    clusters = GramRows.of(evidence.cluster_sums.C).n_not_proportional(ROUNDING)
    for (level, varying, kind), not_proportional in zip(_levels(shape), (evidence.not_proportional, clusters), strict=True):
        fixed = [a for a in varying if a != one and one in varying and not not_proportional[one, a]]
        if fixed and kind != "isotropic":
            shape = replace(shape, **{level: tuple(a for a in varying if a not in fixed)})  # type: ignore[arg-type]
            what = f"{listing([terms[a] for a in fixed], 8)} {'is' if len(fixed) == 1 else 'are'} constant within every {level}"
            notes.append(f"{what}, and so {'does' if len(fixed) == 1 else 'do'} not vary by {level}")
    return shape, tuple(notes)


def _constant_within(evidence: Evidence, columns: WorkingColumns, terms: Sequence[str]) -> Anything:
    """Which terms are proportional to the intercept within every cluster, and within every client, ``(2, d)``."""
    if "Intercept" not in terms:
        return np.zeros((2, len(terms)), dtype=bool)
    one = terms.index("Intercept")
    clusters = GramRows.of(columns.losses_to_user_units(evidence.cluster_sums).C).n_not_proportional(PROPORTIONAL)
    return np.stack([clusters[one] == 0, evidence.clearly_not_proportional[one] == 0])


def pooled(network: CountingNetwork, free: Anything) -> Floats:
    """The coefficients ``(d,)`` of one model for all rows, zero where they are not ``free``.

    It is an error if some coefficient has no finite estimate.
    """
    chosen = np.flatnonzero(free)
    k, d = network.tree.n_clusters, len(chosen)
    whole = np.zeros(len(free))
    if not d:
        return whole
    S, order, wbar = np.zeros((1, d, d)), TermOrder(chosen, 0), np.zeros(d)
    if network.loss.linear_start:
        seen = network.ask(SumLogCounts(S, order, wbar))
        wbar = solve_symmetric(seen.C.sum(axis=0), seen.r.sum(axis=0))
    top = UpperLevels(np.tile(wbar, (k, 1)), np.zeros((k, d)), wbar)
    begin, above = BeginMode(S, order, top.w, True), Spread.of_covariances(S, k, 0)
    top, _, runaway, _ = run_newton(network, begin, top, above, tol=1e-8, max_iter=100)
    if runaway.any() and network.loss.curvature[0] == 0.0:
        raise separation([network.terms[a] for a in chosen.tolist()], runaway, network.loss)
    whole[chosen] = top.wbar
    return whole
