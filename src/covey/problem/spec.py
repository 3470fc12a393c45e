"""A specification: everything that says how to fit, in plain values that JSON can hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from covey.errors import FormulaError, PenaltyError, SolverError, one_of
from covey.fitting.baselines import BASELINES
from covey.losses import Loss, Reduction, family_of, loss_of
from covey.solvers.registry import check_options, randomised
from covey.tables.bars import Bar, Grouping, Vary, levels, split_bars, vary_from_bars, vary_from_setting
from covey.tables.design import Design, Formula, split_formula, unscaled
from covey.variance.structure import KINDS, Kind

Penalties = Literal["auto", "reml", "ml", "cv"]
PENALTIES = ("auto", "reml", "ml", "cv")


@dataclass(frozen=True)
class Spec:
    """Everything that says how to fit, in plain values.

    ``client``, ``cluster``, ``weights`` and ``offset`` name columns of the table; ``nested`` if clients' ids have a
    meaning only within their cluster; the rest is explained at the estimators.
    """

    family: str = "gaussian"
    client: str | None = None
    cluster: str | None = None
    weights: str | None = None
    offset: str | None = None
    formula: str | None = None
    fit_intercept: bool = True
    standardize: bool = False
    gamma: Any = None
    lam: Any = None
    alpha: Any = None
    penalty: Penalties = "auto"
    vary: Any = None
    covariance: Any = None
    per_cluster: bool = False
    tests: bool = True
    nested: bool | None = None
    reduction: Reduction = "sum"
    ridge: float = 0.0
    james_stein: bool = False
    baseline: str | None = None
    solver: str = "auto"
    options: Mapping[str, Any] | None = None
    tol: float = 1e-8
    max_iter: int | None = None
    seed: int = 0

    @property
    def loss(self) -> Loss:
        return loss_of(self.family, self.reduction, self.ridge)

    @property
    def named(self) -> bool:
        """Whether columns are found by name, in a table, rather than by position."""
        return any(name is not None for name in (self.client, self.cluster, self.weights, self.offset, self.formula))

    @cached_property
    def bars(self) -> tuple[Bar, ...]:
        """What the formula says of varying terms."""
        return () if self.formula is None else split_bars(split_formula(self.formula)[1])[1]

    def settled(self) -> Spec:
        """With client and cluster as the formula's bars name them, if it has any."""
        if not self.bars:
            return self
        if self.vary is not None:
            raise FormulaError("The formula's bars say what varies, and so does vary=; leave one out.")
        if not self.by_likelihood:
            raise FormulaError(
                "The formula's bars say what is to be learned from the data; leave out gamma, lam, alpha, baseline and "
                "penalty='cv'."
            )
        grouping = levels(self.bars, self.client, self.cluster)
        return replace(
            self,
            client=grouping.client,
            cluster=grouping.cluster,
            nested=grouping.nested if self.nested is None else self.nested,
        )

    def varying(self, design: Design) -> Vary:
        """Which of a design's terms vary at each level."""
        plain = unscaled(design)
        if self.bars and isinstance(plain, Formula):
            return vary_from_bars(self.bars, Grouping(self.client, self.cluster, bool(self.nested)), plain)
        return vary_from_setting(self.vary, design.terms)

    def check(self) -> None:
        """Refuse settings that no data could make right."""
        loss_of(self.family, self.reduction, self.ridge)
        self._check_penalty()
        check_options(self.solver, self.options)
        if self.baseline is not None and self.baseline not in BASELINES:
            raise one_of("baseline", self.baseline, BASELINES)
        if self.baseline is not None and self.solver in randomised():
            raise SolverError(f"A baseline is solved exactly; leave out solver={self.solver!r} and its options.")
        for name in ("james_stein", "standardize"):
            if not isinstance(getattr(self, name), bool | np.bool_):
                raise SolverError(f"The {name!r} parameter must be True or False. Got {getattr(self, name)!r} instead.")
        if self.james_stein and (self.baseline is not None or self.solver in randomised()):
            other = f"baseline={self.baseline!r}" if self.baseline is not None else f"solver={self.solver!r}"
            raise SolverError(f"james_stein=True shrinks the global model of an exact hierarchical fit; leave out {other}.")
        if not (isinstance(self.tol, int | float) and self.tol > 0):
            raise SolverError(f"The 'tol' parameter must be a positive number. Got {self.tol!r} instead.")
        if not (isinstance(self.seed, int) and self.seed >= 0):
            raise SolverError(f"The seed (random_state) must be a whole number >= 0. Got {self.seed!r} instead.")
        if not (self.max_iter is None or (isinstance(self.max_iter, int | np.integer) and self.max_iter >= 1)):
            raise SolverError(f"The 'max_iter' parameter must be a whole number >= 1. Got {self.max_iter!r} instead.")

    @property
    def learns(self) -> str | None:
        """``"reml"``, ``"ml"`` or ``"cv"`` if penalties are to be learned; None if they are given, or a baseline needs none."""
        if self.baseline is not None:
            return None
        if self.penalty != "auto":
            return self.penalty
        if any(value is not None for value in (self.gamma, self.lam, self.alpha)):
            return None
        return "reml" if family_of(self.family).reml else "ml"

    @property
    def by_likelihood(self) -> bool:
        return self.learns in ("reml", "ml")

    @property
    def in_two_steps(self) -> bool:
        """Whether learned penalties go to a solver that knows only numbers, not the likelihood's own fit."""
        return self.solver in randomised() or bool(self.james_stein)

    @property
    def kinds(self) -> dict[str, Kind | None]:
        """The covariance that is asked for at each level."""
        asked = self.covariance
        by_level = asked if isinstance(asked, Mapping) else {"client": asked, "cluster": asked}
        for level, kind in by_level.items():
            if level not in ("client", "cluster"):
                raise PenaltyError(f"The 'covariance' parameter has the key {level!r}; its levels are 'client' and 'cluster'.")
            if kind is not None and kind not in KINDS:
                raise one_of("covariance", kind, KINDS)
        return {level: by_level.get(level) for level in ("client", "cluster")}

    def _check_penalty(self) -> None:
        """Refuse settings of the penalties that contradict each other."""
        if self.penalty not in PENALTIES:
            raise one_of("penalty", self.penalty, PENALTIES)
        if self.penalty == "reml" and not family_of(self.family).reml:
            raise PenaltyError(f"penalty='reml' is for the gaussian family; for {self.family} use 'ml', which is by Laplace.")
        if self.by_likelihood and not family_of(self.family).likelihood:
            raise PenaltyError(
                f"The loss {self.family!r} is no likelihood to learn penalties from; give gamma and lam, or penalty='cv'."
            )
        given = [name for name in ("gamma", "lam", "alpha") if getattr(self, name) is not None]
        if self.penalty != "auto" and (given or self.baseline is not None):
            other = given[0] if given else "baseline"
            raise PenaltyError(f"penalty={self.penalty!r} chooses the penalties itself; leave out {other}=.")
        for name in ("per_cluster", "tests"):
            if not isinstance(getattr(self, name), bool | np.bool_):
                raise PenaltyError(f"The {name!r} parameter must be True or False. Got {getattr(self, name)!r} instead.")
        asked = [name for name in ("vary", "covariance") if getattr(self, name) is not None]
        asked += ["per_cluster"] if self.per_cluster else []
        if any(self.kinds.values()) and self.in_two_steps and set(self.kinds.values()) != {"isotropic"}:
            why = f"solver={self.solver!r}" if self.solver in randomised() else "james_stein=True"
            raise PenaltyError(f"{why} knows one penalty for all terms; leave out covariance=, or set it to 'isotropic'.")
        if asked and not self.by_likelihood:
            raise PenaltyError(
                f"{asked[0]}= says what to learn from the likelihood; leave it out, or leave out gamma, lam, alpha, baseline "
                "and penalty='cv'."
            )
        if self.by_likelihood and (self.reduction == "mean" or self.ridge):
            odd = "reduction='mean'" if self.reduction == "mean" else f"ridge={self.ridge!r}"
            raise PenaltyError(f"With {odd} the loss is no likelihood to learn penalties from; give gamma, or penalty='cv'.")
