"""James-Stein (prop. JS): the global model drawn to zero by as much as its own uncertainty tells.

Under the hierarchical model ``wbar ~ N(wbar*, noise V)`` with ``V^-1 = sum_j D_j``, and the server, which solves for ``wbar``,
knows both. So it can shrink ``wbar`` and send that down the tree; no client has to tell it more. The positive-part factor is

    max(0, 1 - (e - 2) noise / (wbar' V^-1 wbar))        e = trace(Q V) / largest eigenvalue of Q V

(Bock 1975), which lowers the expected error ``(wbar - wbar*)' Q (wbar - wbar*)``; for ``Q = I`` and ``V`` a multiple of it
``e = d``. Clients take their share ``M_i`` of ``wbar`` through their own data, so theirs is the error with
``Q = sum_i M_i' M_i``, and what helps the global model may harm them: the smaller ``e`` of the two is taken. The server
knows the mean share of each cluster's clients, and uses that for each of them. With ``e <= 2`` nothing is to be gained and
``wbar`` stays.

The noise of a Gaussian response is estimated from what the fit leaves, twice its objective on ``N - d`` degrees of freedom (the
divisor of least risk is two more); for counts and classes it is 1. Weights are precisions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from covey._typing import Floats
from covey.errors import SolverError
from covey.losses import Loss
from covey.nodes.network import Message, Network, Node
from covey.objective.objective import Penalty
from covey.solvers.direct.elimination import Quadratic, Spread, eliminate
from covey.solvers.result import Fit
from covey.tree.hierarchy import Hierarchy


def factor(wbar: Floats, precision: Floats, noise: float = 1.0, shares: Floats | None = None) -> float:
    """What to multiply ``wbar`` by, given the matrix ``V^-1 (d, d)`` and the clients' ``Q (d, d)``.

    >>> factor(np.array([1.0, 1.0, 1.0, 1.0]), np.eye(4))
    0.5
    """
    eigenvalues, vectors = np.linalg.eigh(precision)
    if not eigenvalues[0] > 1e-12 * eigenvalues[-1]:
        return 1.0  # some direction of wbar is not determined at all
    root = vectors / np.sqrt(eigenvalues)  # root root' = V
    effective = min(_effective(root.T @ Q @ root) for Q in (np.eye(len(wbar)), shares) if Q is not None)
    size = float(wbar @ precision @ wbar)
    if effective <= 2 or size <= 0:
        return 1.0
    return max(0.0, 1.0 - (effective - 2) * noise / size)


def _effective(spread: Floats) -> float:
    """Trace over largest eigenvalue; 0 where there is nothing."""
    largest = float(np.linalg.eigvalsh(spread)[-1])
    return float(np.trace(spread)) / largest if largest > 0 else 0.0


def client_shares(seen: Quadratic, penalty: Penalty, tree: Hierarchy) -> Floats:
    """``Q``: how much clients move with ``wbar``, squared and summed, from what the server sees of each cluster.

    A client moves by ``M_i = gamma_i (A_i + gamma_i)^-1 = I - C_i / gamma_i`` with its cluster, which moves by
    ``(I + C_j / lam_j)^-1`` with ``wbar``; the mean over a cluster's clients, by ``gamma``, is ``I - C_j / sum gamma_i``.
    """
    d = seen.r.shape[1]
    tied = penalty.lam > 0
    C, identity = seen.C[tied], np.eye(d)
    with np.errstate(divide="ignore"):
        cluster = np.linalg.inv(identity + C / penalty.lam[tied, None, None])
    share = (identity - C / penalty.cluster_gamma[tied, None, None]) @ cluster
    clients = tree.sum_up((penalty.gamma > 0).astype(np.float64)[:, None])[tied, 0]
    Q: Floats = np.einsum("j,jab,jac->bc", clients, share, share)
    return Q


@dataclass
class Shrink:
    """For the sweep, to ``settle`` the global model from nothing but what the server sees; remembers the factor it found."""

    penalty: Penalty
    tree: Hierarchy
    factor: float = 1.0

    def __call__(self, wbar: Floats, seen: Quadratic, whole: Quadratic) -> Floats:
        self.factor = factor(wbar, whole.C[0], noise(wbar, whole), client_shares(seen, self.penalty, self.tree))
        return self.factor * wbar


def noise(wbar: Floats, whole: Quadratic) -> float:
    """The variance of a Gaussian response: what the fit leaves, over the rows less the coefficients that nothing holds."""
    left = float(2 * whole.c[0] - whole.r[0] @ wbar)
    return max(left, 0.0) / max(float(whole.n[0]) - len(wbar) + 2, 1.0)


@dataclass(frozen=True)
class CurvatureAtFit(Message[Quadratic], label="curvature of the fit", phase="measure"):
    """What clusters see of the clients' losses, expanded where the clients are."""

    def at(self, node: Node) -> Quadratic:
        data, theta = node.data, node.coefficients()
        # A quadratic loss is its own expansion, taken at zero to be the one of the sweep.
        here = node.loss.expand(data, np.zeros_like(theta) if node.loss.quadratic else theta)
        own = Quadratic(here.hessian, -here.gradient, here.value, data.rows_that_count)
        return eliminate(own, Spread.of_penalty(node.gamma, data.n_terms), data.hierarchy.cluster_ptr)


def factor_of(network: Network, penalty: Penalty, fit: Fit) -> float:
    """The factor for a fit at its minimum, whatever the loss: ``V`` is that of its Hessians there."""
    seen = network.ask(CurvatureAtFit())
    whole = eliminate(seen, Spread.of_penalty(penalty.lam, len(network.terms)), np.array([0, network.tree.n_clusters]))
    dispersion = noise(fit.wbar, whole) if network.loss.reml else 1.0
    return factor(fit.wbar, whole.C[0], dispersion, client_shares(seen, penalty, network.tree))


def shrunk(fit: Fit, factor: float) -> Fit:
    """A fit below a global model that was shrunk, with a message that says so."""
    message = f"{fit.convergence.message}; of the global model James-Stein keeps {100 * factor:.3g}%"
    return replace(fit, convergence=replace(fit.convergence, message=message))


def check(loss: Loss, penalty: Penalty) -> None:
    """Refuse what the distribution of ``wbar`` is not known for."""
    if loss.reduction != "sum" or loss.ridge > 0:
        raise SolverError(
            "james_stein=True needs the likelihood itself to say how sure the global model is; use reduction='sum' and ridge=0."
        )
    if not loss.likelihood or (loss.dispersion and not loss.reml):
        raise SolverError(
            f"james_stein=True needs a linear model, or responses whose variance follows from their mean, unlike those of the "
            f"{loss.name} loss; leave it out."
        )
    if not penalty.lam.any() or not penalty.gamma.any():
        raise SolverError("james_stein=True shrinks the global model, but no client is tied to it; give lam and gamma above 0.")
