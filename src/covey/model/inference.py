"""How sure the models are: covariances at every level, given the variance components, and the intervals made of them.

Going down the tree, what is not known of a child is its own spread, as far as its data leaves that open, and what is not known
of its parent, as far as it leans on it:

    V = s2 (sum D_j)^-1       V_j = s2 (I + S C_j)^-1 S + J_j V J_j'       V_i = s2 (I + S_i A_i)^-1 S_i + J_i V_j J_i'

A client that was not seen has its cluster's model and the whole spread of clients about it: ``V_j + s2 S_i``; one of an unseen
cluster ``V + s2 S + s2 S_i``. Variance components count as known, so with few clusters intervals are a little short; but for
the global model and unseen clusters, where that matters most, they are those of a t distribution.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy import special

from covey._typing import Anything, Floats, Ints
from covey.errors import SolverError
from covey.solvers.direct.elimination import eliminate, posterior
from covey.tree.hierarchy import Hierarchy, Level, Resolved, segment_sum
from covey.variance.components import Learned
from covey.variance.linear_likelihood import cluster_covariances

_ROWS = 1 << 16  # rows whose covariances exist at the same time


@dataclass(frozen=True)
class Posterior:
    """What is not known of the coefficients of a fitted hierarchy, in the units of the response."""

    learned: Learned
    tree: Hierarchy
    terms: tuple[str, ...]

    @property
    def whole(self) -> Floats:
        """The covariance of the global coefficients, ``(d, d)``."""
        return self.learned.covariance

    @property
    def with_sums(self) -> Learned:
        """What was learned, if it has the clients' sums."""
        if not self.learned.has_sums:
            raise SolverError(
                "This model is without the sums of which intervals and updates are made: save it with sums=True, or ask at the "
                "sites that have them."
            )
        return self.learned

    @property
    def with_everybody(self) -> Learned:
        """What was learned, if it has the sums of all clients that it was learned from."""
        if self.learned.whole is not None:
            raise SolverError(
                "This model is one part of a fit across sites, and the sums of all clients are nowhere together; fit across "
                "the sites again instead."
            )
        return self.with_sums

    @cached_property
    def freedom(self) -> Floats:
        """Degrees of freedom of each global coefficient, by containment: the units it is compared between, less what they fit.

        A term that varies by cluster, or is constant within clusters whose intercepts vary, is known from as many cases as
        there are clusters; then the same for clients; else from rows.
        """
        found, whole, k, d = self.learned.components, self.learned.whole, self.tree.n_clusters, len(self.terms)
        n = self.tree.n_clients if whole is None else whole.clients
        between, within = (np.isin(self.terms, level.terms) for level in (found.cluster, found.client))
        if whole is None:
            flat_cluster, flat_client = self._constant(self.tree.cluster_ptr), self._constant(np.arange(n + 1))
        else:
            flat_cluster, flat_client = whole.flat
        one = np.array([term == "Intercept" for term in self.terms])
        steady = flat_cluster & bool((between & one).any())
        settled = flat_client & ~(flat_cluster & (k > 1)) & bool((within & one).any())
        by_cluster = k - np.where(flat_cluster, flat_cluster.sum(), 1)
        by_client = n - (k if k > 1 else 0) - np.where(settled, settled.sum(), int(k == 1))
        freedom = np.where(between | steady, by_cluster, np.where(within | settled, by_client, found.rows - d))
        return np.asarray(np.maximum(freedom, 1), dtype=np.float64)

    def _constant(self, ptr: Ints) -> Anything:
        """Which terms are constant within every unit, as far as sums tell."""
        nothing = np.array([term == "Intercept" for term in self.terms])
        if not self.learned.has_sums or not nothing.any():
            return nothing
        A, one = segment_sum(self.learned.units.C, ptr), int(nothing.argmax())
        full = np.einsum("iaa->ia", A) * A[:, one, one][:, None]
        return np.asarray((full - A[:, one] ** 2 <= 1e-10 * full).all(axis=0))

    def reach(self, coverage: float, chosen: Resolved, level: Level) -> Floats:
        """How many standard errors an interval reaches to either side, for each row.

        With a cluster that was seen, as far as a normal's; without, as far as a t's with as many degrees of freedom as there
        are clusters to learn from.
        """
        anywhere = (chosen.cluster < 0) | (level == "global") | (level == "cluster" and self.tree.n_clusters == 1)
        return np.asarray(np.where(anywhere, quantile(coverage, self.freedom.min()), quantile(coverage)))

    @cached_property
    def clusters(self) -> Floats:
        """The covariance of each cluster's coefficients, ``(k, d, d)``."""
        if self.learned.whole is not None:
            return self.learned.whole.clusters
        learned = self.with_sums
        seen = eliminate(learned.units, learned.client, self.tree.cluster_ptr)
        s2 = learned.dispersion
        return s2 * cluster_covariances(seen.C, learned.cluster.shape[0], learned.covariance / s2)

    @cached_property
    def clients(self) -> Floats:
        """The covariance of each client's coefficients, ``(n, d, d)``."""
        learned = self.with_sums
        above = self.clusters / learned.dispersion
        return learned.dispersion * posterior(learned.units.C, learned.client, self.tree.parent, above)

    @cached_property
    def new_clients(self) -> Floats:
        """The covariance of a client that was not seen, about its cluster's model ``(k, d, d)``, the global one last."""
        learned, s2 = self.learned, self.learned.dispersion
        each = learned.each
        anywhere = self.whole + s2 * learned.cluster.shape[0] + s2 * each.mean(axis=0)
        return np.concatenate([self.clusters + s2 * each, anywhere[None]])

    def standard_errors(self, level: Level) -> Floats:
        """Of every coefficient of a level: ``(n, d)``, ``(k, d)`` or ``(d,)``."""
        if level == "global":
            return np.asarray(np.sqrt(np.diag(self.whole)))
        covariance = self.clients if level == "client" else self.clusters
        return np.asarray(np.sqrt(np.maximum(np.einsum("iaa->ia", covariance), 0.0)))

    def margin_variance(self, X: Floats, chosen: Resolved, level: Level) -> Floats:
        """The variance of ``x'theta`` for rows whose models are ``chosen``; new clients' own spread included."""
        table, which = self._table(chosen, level)
        out = np.empty(len(X))
        for start in range(0, len(X), _ROWS):
            rows = slice(start, start + _ROWS)
            out[rows] = np.einsum("la,lab,lb->l", X[rows], table[which[rows]], X[rows])
        return np.maximum(out, 0.0)

    def _table(self, chosen: Resolved, level: Level) -> tuple[Floats, Ints]:
        if level == "global":
            return self.whole[None], np.zeros(len(chosen.client), dtype=np.int64)
        if level == "cluster":
            return np.concatenate([self.clusters, self._new_cluster()]), chosen.index(0)
        if not (chosen.client >= 0).any():
            return self.new_clients, chosen.index(0)
        return np.concatenate([self.clients, self.new_clients]), chosen.index(self.tree.n_clients)

    def _new_cluster(self) -> Floats:
        return np.asarray(self.whole + self.learned.dispersion * self.learned.cluster.shape[0])[None]

    @cached_property
    def reliability(self) -> Floats:
        """How much of each coefficient's spread among clients a client's own rows resolve, ``(n, d)``.

        0: it is its cluster's model; 1: it stands on its own data. NaN where a coefficient does not vary.
        """
        learned, d = self.with_sums, len(self.whole)
        alone = posterior(learned.units.C, learned.client, self.tree.parent, np.zeros((self.tree.n_clusters, d, d)))
        before = np.einsum("iaa->ia", learned.client.shape)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(before > 0, 1.0 - np.einsum("iaa->ia", alone) / before, np.nan)


def quantile(coverage: float, freedom: Any = np.inf) -> Any:
    """How many standard errors to either side an interval reaches, given degrees of freedom."""
    if not (isinstance(coverage, int | float | np.number) and 0 < coverage < 1):
        raise SolverError(f"The 'coverage' parameter must lie between 0 and 1. Got {coverage!r} instead.")
    return np.where(np.isinf(freedom), special.ndtri(0.5 + coverage / 2), special.stdtrit(freedom, 0.5 + coverage / 2))[()]
