"""Fits with sparse shared columns: what is refused, and how the coefficients of these columns join a fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from covey.errors import PenaltyError, SolverError
from covey.nodes.network import Network
from covey.objective.objective import Penalty
from covey.problem.settings import Spec
from covey.solvers import registry
from covey.solvers.direct.elimination import Quadratic
from covey.solvers.direct.profile import Prepared, PutShared, fit_profile, prepare
from covey.solvers.result import Fit
from covey.solvers.solving import solve
from covey.variance.components import Learned

_DENSE = "leave it out, or use dense columns (sparse=False, or X.toarray())"


def check_sparse(spec: Spec, clients: int) -> None:
    """Raise an error for settings that cannot be combined with sparse columns."""
    iterative = spec.solver if spec.solver not in ("auto", *registry.direct()) else None
    for asked, what in (
        (iterative is not None, f"solver={spec.solver!r}"),
        (spec.baseline is not None, f"baseline={spec.baseline!r}"),
        (spec.learns == "cv", "penalty='cv'"),
        (spec.james_stein, "james_stein=True"),
        (spec.standardize, "standardize=True"),
        (bool(spec.options), "options="),
    ):
        if asked:
            raise SolverError(f"{what} is not supported with sparse columns; {_DENSE}.")
    if clients == 1:
        raise SolverError(
            "Sparse columns need several clients, because only the other terms vary: pass client= to fit, or pass X.toarray()."
        )
    if spec.by_likelihood and spec.loss.dispersion and not spec.loss.reml:
        raise PenaltyError(
            f"With sparse columns the penalties of the {spec.family} family cannot be learned; give gamma and lam, or use "
            "dense columns (sparse=False, or X.toarray())."
        )


def penalised(network: Network, penalty: Penalty, spec: Spec, settings: dict[str, Any]) -> Fit:
    """Fit with given penalties."""
    settings = {name: value for name, value in settings.items() if name not in ("tol", "max_iter")}

    def run(start: Fit | None) -> Fit:
        return solve(network, penalty, start=start, tol=spec.tol, max_iter=spec.max_iter, **settings)

    return fit_profile(network, penalty, run, tol=spec.tol, max_iter=spec.max_iter)


def begin(network: Network) -> Prepared:
    """Prepare sparse columns, and give them the coefficients of one model for all rows."""
    prepared = prepare(network)
    network.every(PutShared(prepared.start))
    return prepared


def finished(learned: Learned, prepared: Prepared) -> Learned:
    """Estimates with the notes on sparse columns, and without sums of clients, which lack these columns."""
    d = len(learned.terms)
    nothing = Quadratic(np.empty((0, d, d)), np.empty((0, d)), np.empty(0), np.empty(0))
    components = replace(learned.components, notes=(*prepared.notes, *learned.components.notes))
    return replace(learned, components=components, units=nothing, more=len(prepared.start))
