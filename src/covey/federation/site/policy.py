"""What a site allows: which columns may be asked about, how few clients a sum may have, and what may leave it in words."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from covey.errors import CoveyError, FederationError, FormulaError, ModelError, PenaltyError, SolverError, listing
from covey.federation.wire.agreement import formula_of
from covey.model.files import check_target
from covey.problem.problem import Problem
from covey.tables.rows import GroupedData

MINIMUM = 3  # clients in a sum, unless the site says otherwise

_OF_SETTINGS = (FederationError, FormulaError, PenaltyError, SolverError)  # errors that are not about rows


@dataclass(frozen=True)
class Policy:
    """What a site allows.

    Parameters
    ----------
    minimum : clients that each sum that leaves the site must have
    client, columns : the column of its clients, and all columns that may be asked about, as they are; None for any
    secure : whether it sends sums under masks only
    share_row_errors : whether sentences about its rows may leave it; in a simulation they may
    """

    minimum: int = MINIMUM
    client: str | None = None
    columns: Sequence[str] | None = None
    secure: bool = False
    share_row_errors: bool = False

    def check_problem(self, problem: Problem) -> None:
        """Refuse columns that the site does not let be asked about, and other clients than it has."""
        spec, (formula, _) = problem.spec, formula_of(problem)
        if self.client is not None and spec.client != self.client:
            raise FederationError(f"The clients of this site are in column {self.client!r}, not {spec.client!r}.")
        if self.columns is None:
            return
        for factor in formula.factors:
            if factor.kind != "lookup":  # an expression could pick out single rows
                raise FederationError(
                    f"This site answers about columns as they are, not about {factor.expression!r}; leave it out."
                )
        named = {factor.expression for factor in formula.factors}
        named |= {name for name in (spec.client, spec.cluster, spec.weights, spec.offset) if name is not None}
        foreign = sorted(named - {*self.columns, self.client})
        if foreign:
            raise FederationError(
                f"This site does not answer about column {foreign[0]!r}; ask about {listing(self.columns, 8)}."
            )

    def check_secure(self, secure: bool) -> None:
        """Refuse sums that are not masked, if the site sends no others."""
        if self.secure and not secure:
            raise FederationError("This site sends its sums under masks only; run it with --secure.")

    def check_clusters(self, data: GroupedData) -> None:
        """Refuse to send sums over fewer clients than the minimum."""
        sizes = data.hierarchy.sizes
        few = np.flatnonzero((sizes > 0) & (sizes < self.minimum))
        if len(few):
            j = int(few[0])
            raise FederationError(
                f"There are fewer clients of cluster {data.hierarchy.cluster_ids[j]!r} here than the {self.minimum} that this "
                "site wants in each sum it sends; lower its minimum, or leave the cluster out."
            )

    def sentence(self, problem: CoveyError, home: Path | None) -> str:
        """What may leave the site of an error: one about rows names clients and values, so it stays in the site's own log."""
        if self.share_row_errors or isinstance(problem, _OF_SETTINGS) or _of_schema(problem):
            return str(problem)
        print(f"covey: {problem}", file=sys.stderr)
        if home is not None:
            (home / "refusal.txt").write_text(f"{problem}\n")
        return "Its table cannot be used as it is; the site's own log (refusal.txt in its home) says which column and row."


def check_models(folder: Path | None) -> None:
    """Refuse a folder for models that holds other things; which ones stays in the site's own log."""
    try:
        if folder is not None:
            check_target(folder)
    except ModelError as problem:
        print(f"covey: {problem}", file=sys.stderr)
        raise FederationError(
            "The folder for its clients' models holds other things or cannot be written; the site's own log says more."
        ) from None


def _of_schema(problem: CoveyError) -> bool:
    """Whether a sentence is about what columns there are, and not about what is in them."""
    return str(problem).startswith(("There is no column", "The table has no rows", "There is no file"))
