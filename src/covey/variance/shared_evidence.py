"""Whether sparse shared columns already give every client, or every cluster, its own coefficient of a term that varies.

Then the variance of that term is not identifiable, as :func:`.identify.check_identifiable` finds for dense columns. A unit's
coefficient is determined if nothing is left of its column of ``X`` beside all columns ``[X | Z]``. With ``A_i`` and ``G_i`` of
:mod:`covey.solvers.direct.shared`, ``P`` the inverse of what is left of ``Z'Z`` beside ``X`` and ``W = -(X'X)^-1 X'Z``, it is

    diag(A_i - A_i (X'X)^-1 A_i - (G_i + A_i W) P (G_i + A_i W)')
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from covey._typing import Floats
from covey.nodes.network import Network, Node, Request
from covey.solvers.direct.elimination import solve_columns
from covey.solvers.direct.profile import shared_of
from covey.solvers.direct.shared import Entries, Layout, SharedSums, eliminate_upper, sum_shared
from covey.tree.hierarchy import segment_sum
from covey.variance.evidence import DETERMINED
from covey.variance.identify import refuse_determined
from covey.variance.parameters import Shape
from covey.variance.shared_likelihood import forms_of, symmetric_product


@dataclass(frozen=True)
class SumProducts(Request[SharedSums]):
    """Return the products of all columns by client and by cluster; nothing is eliminated."""

    def at(self, node: Node) -> SharedSums:
        data, Z = node.data, shared_of(node.data).Z
        curves = np.ones(data.n_rows) if data.weights is None else data.weights
        layout, nothing = Layout.of(Z, Z.shape[1], data.client_ptr, data.hierarchy), np.zeros((1, data.n_terms, data.n_terms))
        return sum_shared(data, layout, curves, nothing, response=False)


def check_determined(network: Network, shape: Shape) -> None:
    """Raise an error if the common coefficients determine those of every client or cluster."""
    terms = network.terms
    free, whole = shape.free(np.arange(len(terms))), np.zeros((len(terms), len(terms)))
    (sums,) = network.every(SumProducts())
    top = eliminate_upper(sums, np.zeros((1, *whole.shape)), free)
    W, P = top.response, top.covariance()
    WP = symmetric_product(P, W)
    within = np.ix_(free, free)
    whole[within] = solve_columns(sums.B.sum(axis=0)[within][None], np.eye(int(free.sum()))[None])[0][0]
    whole += WP @ W.T
    clients = "client", shape.client, sums.layout.clients, sums.G, sums.A
    clusters = "cluster", shape.cluster, sums.layout.clusters, sums.H, sums.B
    for level, varying, units, G, A in (clients, clusters):
        left = _left(units, G, A, P, WP, whole)
        size = np.einsum("iaa->ia", A)
        refuse_determined((left > DETERMINED * size).sum(axis=0).astype(np.float64), varying, terms, level)


def _left(units: Entries, G: Floats, A: Floats, P: Floats, WP: Floats, inverse: Floats) -> Floats:
    """What is left of each unit's columns, ``(units, d)``."""
    GPG = forms_of(units, G, P, own=False)[0]
    crossed = segment_sum(G[:, :, None] * WP.T[units.columns][:, None, :], units.ptr)
    return np.asarray(np.einsum("iaa->ia", A - GPG - 2 * crossed @ A - A @ inverse @ A))
