"""James-Stein shrinkage of the global model: Proposition 5.4 (JS) of arXiv:2204.13619.

Under the hierarchical model ``wbar ~ N(wbar*, noise V)`` with ``V^-1 = sum_j D_j``. The coordinator, which solves for ``wbar``,
has both. So it can shrink ``wbar`` before it goes down the tree, and clients send nothing more. The positive-part factor

    max(0, 1 - (e - 2) noise / (wbar' V^-1 wbar))        e = trace(Q V) / largest eigenvalue of Q V

lowers the expected error ``(wbar - wbar*)' Q (wbar - wbar*)`` (Bock 1975). For ``Q = I`` and ``V`` a multiple of it, ``e = d``.

A client takes its share ``M_i`` of ``wbar``, so the error of the clients is the one with ``Q = sum_i M_i' M_i``. A factor that
helps the global model may harm the clients, so the smaller ``e`` of the two is used. The coordinator has the mean share of the
clients of each cluster, and uses it for each of them. If ``e <= 2``, nothing can be gained and ``wbar`` stays.

The noise of a Gaussian response is estimated as twice the objective over ``N - d`` degrees of freedom (the divisor of least
risk is two more). For counts and classes it is 1. Weights are precisions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from covey._typing import Floats
from covey.errors import SolverError
from covey.losses import Loss
from covey.nodes.network import Message, Network, Node
from covey.objective.objective import Penalty
from covey.solvers.direct.elimination import Quadratic, Spread, eliminate, expanded
from covey.solvers.result import Fit
from covey.tree.hierarchy import Hierarchy


def factor(wbar: Floats, precision: Floats, noise: float = 1.0, shares: Floats | None = None) -> float:
    """The factor for ``wbar (d,)``, given ``precision = V^-1 (d, d)`` and ``shares = Q (d, d)`` of the clients.

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
    """The effective dimension: trace over largest eigenvalue; 0 for a zero matrix."""
    largest = float(np.linalg.eigvalsh(spread)[-1])
    return float(np.trace(spread)) / largest if largest > 0 else 0.0


def client_shares(seen: Quadratic, penalty: Penalty, tree: Hierarchy) -> Floats:
    """``Q = sum_i M_i' M_i`` from the quadratics of the clusters, where ``M_i`` is how far client ``i`` moves with ``wbar``.

    A client moves by ``gamma_i (A_i + gamma_i)^-1 = I - C_i / gamma_i`` with its cluster. The mean of this over a cluster's
    clients, weighted by ``gamma``, is ``I - C_j / sum gamma_i``. The cluster moves by ``(I + C_j / lam_j)^-1`` with ``wbar``.
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
    """Shrinks the global model during a sweep, as its ``settle``, and remembers the factor."""

    penalty: Penalty
    tree: Hierarchy
    factor: float = 1.0

    def __call__(self, wbar: Floats, seen: Quadratic, whole: Quadratic) -> Floats:
        self.factor = factor(wbar, whole.C[0], noise(wbar, whole), client_shares(seen, self.penalty, self.tree))
        return self.factor * wbar


def noise(wbar: Floats, whole: Quadratic) -> float:
    """The residual variance of a Gaussian response: residual sum of squares over rows less unpenalised coefficients."""
    left = float(2 * whole.c[0] - whole.r[0] @ wbar)
    return max(left, 0.0) / max(float(whole.n[0]) - len(wbar) + 2, 1.0)


@dataclass(frozen=True)
class CurvatureAtFit(Message[Quadratic], label="curvature of the fit", phase="measure"):
    """Ask what clusters see of the clients' losses, expanded at the clients' coefficients."""

    def at(self, node: Node) -> Quadratic:
        data, theta = node.data, node.coefficients()
        # A quadratic loss is its own expansion; taken at zero, the result is that of the sweep.
        clients = expanded(data, node.loss, np.zeros_like(theta) if node.loss.quadratic else theta)
        return eliminate(clients, Spread.of_penalty(node.gamma, data.n_terms), data.hierarchy.cluster_ptr)


def factor_of(network: Network, penalty: Penalty, fit: Fit) -> float:
    """The factor for a fit with any loss; ``V`` comes from the Hessians at the minimum."""
    seen = network.ask(CurvatureAtFit())
    whole = eliminate(seen, Spread.of_penalty(penalty.lam, len(network.terms)), np.array([0, network.tree.n_clusters]))
    dispersion = noise(fit.wbar, whole) if network.loss.reml else 1.0
    return factor(fit.wbar, whole.C[0], dispersion, client_shares(seen, penalty, network.tree))


def shrunk(fit: Fit, factor: float) -> Fit:
    """A fit with a shrunk global model, with a message that says so."""
    message = f"{fit.convergence.message}; James-Stein shrinkage keeps {100 * factor:.3g}% of the global model"
    return replace(fit, convergence=replace(fit.convergence, message=message))


def check(loss: Loss, penalty: Penalty) -> None:
    """Refuse problems for which the distribution of ``wbar`` is unknown."""
    if loss.reduction != "sum" or loss.ridge > 0:
        raise SolverError(
            "james_stein=True needs the likelihood, from which the precision of the global model follows; use reduction='sum' "
            "and ridge=0."
        )
    if not loss.likelihood or (loss.dispersion and not loss.reml):
        raise SolverError(
            f"james_stein=True needs a linear model, or responses whose variance follows from their mean; the {loss.name} loss "
            "has neither. Leave james_stein out."
        )
    if not penalty.lam.any() or not penalty.gamma.any():
        raise SolverError("james_stein=True shrinks the global model, but no client is tied to it; give lam and gamma above 0.")
