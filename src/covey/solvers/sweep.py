"""The sweep: eliminate clients, then clusters, solve the global block, go back down. Exact, in one exchange.

PAPER.md's closed form of the hierarchical linear model, written with covariances instead of penalties. A child
with loss ``1/2 t'At - b't``, tied to its parent's ``x`` by a covariance ``S`` (the paper: ``S = I / gamma``), is

    K = I + A S        C = K^-1 A        r = K^-1 b        t = x + S (r - C x)

where ``1/2 x'Cx - r'x + c``, ``c = -1/2 b'S r``, is what the parent sees of it and adds up. Nothing cancels when a penalty goes
to infinity (``S = 0``: the child is its parent) or to zero, and ``S`` may be any positive semi-definite matrix, so the
same functions serve scalar, diagonal and full covariances, shared coefficients (a zero on the diagonal) and deeper
trees. An infinite ``S`` (penalty 0) is a detached child: it passes nothing up and takes its own minimiser nearest
to its parent.

    node          sends   Quadratic: sum of (C_i, r_i) over its clients, for each cluster
    coordinator   solves  w, wbar from the sum over nodes
    node          gets    w, computes its clients' theta; they stay there
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import polars as pl
from numba import njit, prange

from covey._typing import Floats, Ints
from covey.data import GroupedData
from covey.errors import SolverError, warn
from covey.hierarchy import segment_sum
from covey.ledger import quadratic_links
from covey.losses import Loss
from covey.objective import Penalty
from covey.solvers.result import HISTORY, Convergence, Fit, certified_gap, entry

_CHUNK = 1 << 15  # clients whose matrices exist at the same time: a million clients need no more memory than this
_BLOCK = 256  # clients summed by one thread before blocks are added in order: the same bits with any number of threads
_WORKING_PRECISION = 1e-13


@dataclass(frozen=True)
class Spread:
    """Covariances of children about their parents: child ``i`` has ``scale[i] * shape[i]``.

    Parameters
    ----------
    scale : (m,) in [0, inf]; ``1 / penalty`` in the paper's case
    shape : (m, d, d), or (1, d, d) for all children alike, or empty for the identity, as in the paper
    """

    scale: Floats
    shape: Floats

    @classmethod
    def of_penalty(cls, penalty: Floats, d: int) -> Spread:
        with np.errstate(divide="ignore"):
            return cls(1.0 / penalty, np.empty((0, d, d)))


@dataclass(frozen=True)
class Quadratic:
    """``1/2 x'Cx - r'x + c`` for each unit, ``C (k, d, d)``, ``r (k, d)``, ``c (k,)``: what travels up. Adds over nodes.

    ``n (k,)`` counts the rows behind it, less the coefficients that were fitted to them without any tie to the parent.
    """

    C: Floats
    r: Floats
    c: Floats
    n: Floats

    def __add__(self, other: Quadratic) -> Quadratic:
        return Quadratic(self.C + other.C, self.r + other.r, self.c + other.c, self.n + other.n)


Settle = Callable[[Floats, Quadratic, Quadratic], Floats]
"""What becomes of the global model: told the minimiser ``wbar`` and what the server sees, of each cluster and of the whole."""


@dataclass(frozen=True)
class Account:
    """What nodes tell of a solution, so that the coordinator can judge it. Adds over nodes.

    The value and squared gradient of their clients, the sum of forces on each cluster ``(k, d)``, the squared size of what
    cancels in the gradient, and a bound on the curvature.
    """

    value: float
    gradient_squared: float
    force: Floats
    size_squared: float
    mu: float

    def __add__(self, other: Account) -> Account:
        return Account(
            self.value + other.value,
            self.gradient_squared + other.gradient_squared,
            self.force + other.force,
            self.size_squared + other.size_squared,
            min(self.mu, other.mu),
        )


def eliminate(children: Quadratic, spread: Spread, ptr: Ints) -> Quadratic:
    """What each parent sees of its children ``ptr[j]:ptr[j + 1]``."""
    blocks, owner = blocks_of(ptr)
    d = children.r.shape[1]
    C, r, c, n = np.zeros((len(blocks) - 1, d, d)), np.zeros((len(blocks) - 1, d)), children.c.copy(), children.n
    _eliminate(children.C, children.r, spread.scale, spread.shape, blocks, C, r, c)
    detached = np.flatnonzero(np.isinf(spread.scale))
    if len(detached):
        A, b = children.C[detached], children.r[detached]
        c[detached] -= 0.5 * np.einsum("ia,ia->i", b, solve_symmetric(A, b))
        n = n.copy()
        n[detached] -= np.linalg.matrix_rank(A, hermitian=True)
    by_parent = np.searchsorted(owner, np.arange(len(ptr)))
    return Quadratic(segment_sum(C, by_parent), segment_sum(r, by_parent), segment_sum(c, ptr), segment_sum(n, ptr))


def descend(A: Floats, b: Floats, spread: Spread, parent: Ints, x: Floats) -> tuple[Floats, Floats]:
    """Each child's solution given its parent's ``x[parent]``, and the force ``r - C x`` that its parent exerts on it."""
    t, force = np.empty_like(b), np.empty_like(b)
    _descend(A, b, spread.scale, spread.shape, parent, x, t, force)
    detached = np.flatnonzero(np.isinf(spread.scale))
    if len(detached):
        at, A, b = x[parent[detached]], A[detached], b[detached]
        t[detached] = at + solve_symmetric(A, b - np.einsum("iab,ib->ia", A, at))
        force[detached] = 0.0
    return t, force


def solve_symmetric(A: Floats, b: Floats) -> Floats:
    """``A^+ b`` for positive semi-definite ``A (m, d, d)``: the shortest solution where there are many.

    The rank is judged after scaling to a unit diagonal, so that columns in different units do not look dependent.
    """
    size = np.sqrt(np.maximum(np.einsum("...aa->...a", A), 0.0))
    unit = np.where(size > 0, size, 1.0)
    scaled = A / (unit[..., :, None] * unit[..., None, :])
    d = A.shape[-1]
    values, vectors = np.linalg.eigh(scaled)
    cut = 16 * d * np.finfo(float).eps * np.maximum(values[..., -1:], 0.0)
    inverse = np.where(values > cut, 1.0 / np.where(values > cut, values, 1.0), 0.0)
    x: Floats = np.einsum("...ab,...b,...cb,...c->...a", vectors, inverse, vectors, b / unit) / unit
    deficient = (values[..., 0] <= cut[..., 0]).ravel()
    if deficient.any():
        flat_A, flat_b, flat_x = A.reshape(-1, d, d), b.reshape(-1, d), x.reshape(-1, d)
        pseudo = np.linalg.pinv(flat_A[deficient], rcond=16 * d * np.finfo(float).eps, hermitian=True)
        flat_x[deficient] = np.einsum("iab,ib->ia", pseudo, flat_b[deficient])
        x = flat_x.reshape(b.shape)
    return x


def solve_top(
    seen: Quadratic, spread: Spread, own: Floats | float = 0.0, settle: Settle | None = None
) -> tuple[Floats, Floats, Floats]:
    """The two upper levels: ``w (k, d)``, the force on each cluster, and ``wbar (d,)``.

    ``own`` is the linear term of the global model itself, zero but inside Newton; ``settle`` may put another global model in
    place of the minimiser before it goes down the tree.
    Without any tie between clusters (all ``lam = 0``) the global model is the plain mean of theirs.
    """
    k = len(seen.r)
    whole = eliminate(seen, spread, np.array([0, k]))
    wbar = solve_symmetric(whole.C, whole.r + own)[0]
    if settle is not None:
        wbar = settle(wbar, seen, whole)
    w, force = descend(seen.C, seen.r, spread, np.zeros(k, dtype=np.int64), wbar[None])
    if settle is None and np.isinf(spread.scale).all():
        wbar = w.mean(axis=0)
    return w, force, wbar


def node_up(data: GroupedData, loss: Loss, gamma: Floats) -> Quadratic:
    """What a node sends: its clients eliminated and summed, for each cluster."""
    k, d = data.n_clusters, data.n_terms
    total = Quadratic(np.zeros((k, d, d)), np.zeros((k, d)), np.zeros(k), np.zeros(k))
    for start, part in _parts(data):
        spread = Spread.of_penalty(gamma[start : start + part.n_clients], d)
        total += eliminate(_normal_equations(part, loss), spread, part.hierarchy.cluster_ptr)
    return total


def node_down(data: GroupedData, loss: Loss, gamma: Floats, w: Floats) -> tuple[Floats, Account]:
    """What a node does with the answer: its clients' ``theta``, which stay, and an account of them."""
    theta = np.empty((data.n_clients, data.n_terms))
    account = Account(0.0, 0.0, np.zeros_like(w), 0.0, np.inf)
    for start, part in _parts(data):
        at = slice(start, start + part.n_clients)
        tree = part.hierarchy
        own = _normal_equations(part, loss)
        spread = Spread.of_penalty(gamma[at], data.n_terms)
        theta[at], force = descend(own.C, own.r, spread, tree.parent, w)
        here = loss.expand(part, theta[at], order=1)
        value = here.value.sum() + 0.5 * (force * (theta[at] - tree.down(w))).sum()
        squared = ((here.gradient + force) ** 2).sum()
        size, mu = float((own.r**2).sum()), loss.smallest_curvature(own.C)
        account += Account(float(value), float(squared), tree.sum_up(force), size, mu)
    return theta, account


def sweep(data: GroupedData, loss: Loss, penalty: Penalty, *, settle: Settle | None = None) -> Fit:
    """The exact minimiser for a Gaussian loss; with ``settle``, the minimiser given the global model that it chooses.

    >>> from covey import GroupedData, Penalty
    >>> from covey.losses import Gaussian
    >>> data = GroupedData.from_arrays([[1.0], [1.0], [1.0]], [0.0, 3.0, 9.0], ["a", "b", "c"], ["x", "x", "y"])
    >>> fit = sweep(data, Gaussian(), Penalty.of(data.hierarchy, gamma=1.0, lam=1.0))
    >>> fit.wbar.round(3).tolist(), fit.theta.ravel().round(3).tolist()
    ([4.5], [1.5, 3.0, 7.5])
    """
    if loss.name != "gaussian":
        raise SolverError(
            f"The solver 'sweep' needs a quadratic loss and the {loss.name} loss is not; use solver='newton', which runs a "
            "sweep at each of its few steps."
        )
    seen = node_up(data, loss, penalty.gamma)
    w, force, wbar = solve_top(seen, Spread.of_penalty(penalty.lam, data.n_terms), settle=settle)
    theta, account = node_down(data, loss, penalty.gamma, w)

    objective = account.value + 0.5 * float((force * (w - wbar)).sum())
    # Clients solve for whatever w they are sent; whether w and wbar are right shows in the balance of forces above them.
    upper = ((force - account.force) ** 2).sum() + ((force.sum(axis=0) ** 2).sum() if settle is None else 0.0)
    norm = float(np.sqrt(account.gradient_squared + upper))
    size = float(np.sqrt(account.size_squared)) + 1.0
    exact = norm <= _WORKING_PRECISION * size
    message = f"solved exactly in one exchange, gradient norm {norm:.1e}"
    mu = account.mu if settle is None else 0.0  # below a global model of one's own choice no gap to the minimum is certain
    if not exact:
        message = (
            f"the gradient norm is {norm:.1e} where rounding alone leaves about {_WORKING_PRECISION * size:.1e}; the "
            "columns are badly scaled: standardise them, or refine with solver='newton'"
        )
        warn(message)
    ledger = quadratic_links(data.hierarchy.sizes, data.n_terms).count(np.ones(data.n_clusters, dtype=np.int64), 1)
    history = pl.DataFrame([entry(1, objective, norm, certified_gap(norm, mu), ledger)], schema=HISTORY)
    end = Convergence("sweep", exact, 1, 1, objective, norm, certified_gap(norm, mu), message)
    return Fit(theta, w, wbar, end, history, ledger)


def _normal_equations(data: GroupedData, loss: Loss) -> Quadratic:
    """``A_i = X_i'W_i X_i``, ``b_i = X_i'W_i (y_i - offset_i)`` and half the sum of squares: the loss expanded at zero."""
    here = loss.expand(data, np.zeros((data.n_clients, data.n_terms)))
    return Quadratic(here.hessian, -here.gradient, here.value, data.rows_that_count)


def _parts(data: GroupedData) -> list[tuple[int, GroupedData]]:
    starts = range(0, data.n_clients, _CHUNK)
    return [(start, data.clients(start, min(start + _CHUNK, data.n_clients))) for start in starts]


def blocks_of(ptr: Ints) -> tuple[Ints, Ints]:
    """Cut each parent's children into blocks of at most ``_BLOCK``; the cuts, and the parent of each block."""
    counts = -(-np.diff(ptr) // _BLOCK)
    owner = np.repeat(np.arange(len(counts)), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    starts = ptr[:-1][owner] + _BLOCK * (np.arange(len(owner)) - first)
    return np.append(starts, ptr[-1]), owner


@njit(inline="always", error_model="numpy")  # type: ignore[untyped-decorator]
def _shape_of(shape: Floats, i: int, identity: Floats) -> Floats:
    if len(shape) == 0:
        return identity
    own: Floats = shape[i] if len(shape) > 1 else shape[0]
    return own


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _absorb(A: Floats, b: Floats, scale: float, shape: Floats, M: Floats) -> None:
    """Solve ``(I + scale A shape) [C | r] = [A | b]`` by elimination with row pivots; leaves ``[C | r]`` in ``M[:, d:]``."""
    d = len(b)
    for a in range(d):
        for c in range(d):
            product = A[a, c]
            if len(shape):
                product = 0.0
                for e in range(d):
                    product += A[a, e] * shape[e, c]
            M[a, c] = scale * product
            M[a, d + c] = A[a, c]
        M[a, a] += 1.0
        M[a, 2 * d] = b[a]
    for p in range(d):
        best = p
        for a in range(p + 1, d):
            if abs(M[a, p]) > abs(M[best, p]):
                best = a
        if best != p:
            for c in range(p, 2 * d + 1):
                M[p, c], M[best, c] = M[best, c], M[p, c]
        for a in range(p + 1, d):
            factor = M[a, p] / M[p, p]
            for c in range(p + 1, 2 * d + 1):
                M[a, c] -= factor * M[p, c]
    for p in range(d - 1, -1, -1):
        for c in range(d, 2 * d + 1):
            rest = M[p, c]
            for a in range(p + 1, d):
                rest -= M[p, a] * M[a, c]
            M[p, c] = rest / M[p, p]
    for a in range(d):
        for c in range(a):
            middle = 0.5 * (M[a, d + c] + M[c, d + a])
            M[a, d + c] = middle
            M[c, d + a] = middle


@njit(parallel=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _eliminate(A: Floats, b: Floats, scale: Floats, shape: Floats, blocks: Ints, C: Floats, r: Floats, c: Floats) -> None:
    d = b.shape[1]
    for block in prange(len(blocks) - 1):
        M, identity = np.empty((d, 2 * d + 1)), np.empty((0, 0))
        for i in range(blocks[block], blocks[block + 1]):
            if np.isinf(scale[i]):
                continue
            S = _shape_of(shape, i, identity)
            _absorb(A[i], b[i], scale[i], S, M)
            for a in range(d):
                for e in range(d):
                    C[block, a, e] += M[a, d + e]
                r[block, a] += M[a, 2 * d]
                moved = M[a, 2 * d]
                if len(S):
                    moved = 0.0
                    for e in range(d):
                        moved += S[a, e] * M[e, 2 * d]
                c[i] -= 0.5 * scale[i] * b[i, a] * moved


@njit(parallel=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _descend(A: Floats, b: Floats, scale: Floats, shape: Floats, parent: Ints, x: Floats, t: Floats, force: Floats) -> None:
    m, d = b.shape
    for block in prange((m + _BLOCK - 1) // _BLOCK):
        M, identity = np.empty((d, 2 * d + 1)), np.empty((0, 0))
        for i in range(block * _BLOCK, min((block + 1) * _BLOCK, m)):
            j = parent[i]
            if np.isinf(scale[i]):
                continue
            S = _shape_of(shape, i, identity)
            _absorb(A[i], b[i], scale[i], S, M)
            for a in range(d):
                pull = M[a, 2 * d]
                for c in range(d):
                    pull -= M[a, d + c] * x[j, c]
                force[i, a] = pull
            for a in range(d):
                moved = force[i, a]
                if len(S):
                    moved = 0.0
                    for c in range(d):
                        moved += S[a, c] * force[i, c]
                t[i, a] = x[j, a] + scale[i] * moved
