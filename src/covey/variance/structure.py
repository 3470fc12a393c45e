"""Which terms vary between clients and between clusters, and how: what is asked for, before any data is seen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from covey._typing import Ints

Kind = Literal["isotropic", "diagonal", "full"]
"""Of a covariance: one variance for all terms (as in the paper, arXiv:2204.13619), one for each, or with correlations."""


@dataclass(frozen=True)
class Shape:
    """Which terms vary at which level, by position, with which kind of covariance.

    With ``per_cluster`` the clients of each cluster have a covariance of their own.
    """

    client: tuple[int, ...]
    cluster: tuple[int, ...]
    client_kind: Kind = "diagonal"
    cluster_kind: Kind = "diagonal"
    per_cluster: bool = False

    def without(self) -> dict[str, Shape]:
        """The two smaller models, by the level that does not vary in them."""
        return {"client": replace(self, client=(), per_cluster=False), "cluster": replace(self, cluster=())}

    def order(self, d: int) -> Ints:
        """The working order of ``d`` terms: those that vary by client, those that vary by cluster only, the others.

        Elimination of a client costs next to nothing for terms that come after those that vary.
        """
        rank = [(a not in self.client and a not in self.cluster, a not in self.client, a) for a in range(d)]
        return np.array(sorted(range(d), key=rank.__getitem__), dtype=np.int64)
