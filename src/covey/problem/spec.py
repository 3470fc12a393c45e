"""A specification: everything that a user says about a fit, in plain values that JSON can hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import date
from typing import Any

import numpy as np

from covey.errors import PenaltyError, SolverError, one_of
from covey.losses import Loss, family_of, loss_of
from covey.problem.settings import BASELINES, KINDS, PENALTIES, Settings

LEVELS = ("client", "cluster")


@dataclass(frozen=True)
class Spec(Settings):
    """Everything that says how to fit, in plain values; each is declared in :class:`.Settings`.

    ``client``, ``cluster``, ``weights`` and ``offset`` name columns of the table; ``nested`` if clients' ids have a
    meaning only within their cluster; the rest is explained at the estimators.
    """

    @property
    def loss(self) -> Loss:
        return loss_of(self.family, self.reduction, self.ridge)

    @property
    def named(self) -> bool:
        """Whether columns are found by name, in a table, rather than by position."""
        return any(name is not None for name in (self.client, self.cluster, self.weights, self.offset, self.formula))

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
    def kinds(self) -> dict[str, Any]:
        """The covariance that is asked for at each level."""
        asked = self.covariance
        by_level = asked if isinstance(asked, Mapping) else {"client": asked, "cluster": asked}
        for level, kind in by_level.items():
            if level not in LEVELS:
                raise PenaltyError(f"The 'covariance' parameter has the key {level!r}; its levels are 'client' and 'cluster'.")
            if kind is not None and kind not in KINDS:
                raise one_of("covariance", kind, KINDS)
        return {level: by_level.get(level) for level in LEVELS}

    def check(self) -> None:
        """Refuse settings that no data could make right; those of the solver are for whoever knows the solvers."""
        loss_of(self.family, self.reduction, self.ridge)
        self._check_penalty()
        if self.baseline is not None and self.baseline not in BASELINES:
            raise one_of("baseline", self.baseline, BASELINES)
        for name in ("james_stein", "standardize"):
            if not isinstance(getattr(self, name), bool | np.bool_):
                raise SolverError(f"The {name!r} parameter must be True or False. Got {getattr(self, name)!r} instead.")
        if self.james_stein and self.baseline is not None:
            raise SolverError(
                f"james_stein=True shrinks the global model of an exact hierarchical fit; leave out baseline={self.baseline!r}."
            )
        if not (isinstance(self.tol, int | float) and self.tol > 0):
            raise SolverError(f"The 'tol' parameter must be a positive number. Got {self.tol!r} instead.")
        if not (isinstance(self.seed, int) and self.seed >= 0):
            raise SolverError(f"The seed (random_state) must be a whole number >= 0. Got {self.seed!r} instead.")
        if not (self.max_iter is None or (isinstance(self.max_iter, int | np.integer) and self.max_iter >= 1)):
            raise SolverError(f"The 'max_iter' parameter must be a whole number >= 1. Got {self.max_iter!r} instead.")

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
        if any(self.kinds.values()) and self.james_stein:
            self.check_isotropic("james_stein=True")
        if asked and not self.by_likelihood:
            raise PenaltyError(
                f"{asked[0]}= says what to learn from the likelihood; leave it out, or leave out gamma, lam, alpha, baseline "
                "and penalty='cv'."
            )
        if self.by_likelihood and (self.reduction == "mean" or self.ridge):
            odd = "reduction='mean'" if self.reduction == "mean" else f"ridge={self.ridge!r}"
            raise PenaltyError(f"With {odd} the loss is no likelihood to learn penalties from; give gamma, or penalty='cv'.")

    def check_isotropic(self, why: str) -> None:
        """Refuse other covariances than the one that a solver with one penalty for all terms can use."""
        if any(self.kinds.values()) and set(self.kinds.values()) != {"isotropic"}:
            raise PenaltyError(f"{why} knows one penalty for all terms; leave out covariance=, or set it to 'isotropic'.")

    def to_json(self) -> dict[str, Any]:
        """As JSON has it, by the names of the fields."""
        plain = {part.name: getattr(self, part.name) for part in fields(self)}
        penalties = {name: _plain_penalty(plain[name]) for name in ("gamma", "lam", "alpha")}
        return {**plain, **penalties, "vary": _plain_vary(self.vary), "options": _plain_options(self.options)}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Spec:
        """The specification that JSON stands for, not checked; what an older covey did not write takes its default."""
        penalties = {name: _penalty_from_plain(plain.get(name)) for name in ("gamma", "lam", "alpha")}
        return cls(**{**plain, **penalties})


def _plain_penalty(value: Any) -> Any:
    """A penalty as JSON: a number, a list, or pairs of id and value; infinity, which JSON lacks, as text."""
    if isinstance(value, Mapping):
        return {"pairs": [[_plain_id(key), _plain_penalty(item)] for key, item in value.items()]}
    if not isinstance(value, Mapping) and np.ndim(value) == 1:
        return [_plain_penalty(item) for item in value]
    if value is None:
        return None
    number = float(value)
    return "inf" if math.isinf(number) else number


def _penalty_from_plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_id_from_plain(key): _penalty_from_plain(item) for key, item in value["pairs"]}
    if isinstance(value, list | tuple):  # the latter if it came in a message
        return [_penalty_from_plain(item) for item in value]
    return math.inf if value == "inf" else value


def _plain_options(options: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A solver's settings as JSON; a checkpoint is a file of the machine that fitted, and stays behind."""
    if options is None:
        return None
    kept = {name: value for name, value in options.items() if name != "checkpoint"}
    return {name: _plain_option(value) for name, value in kept.items()}


def _plain_option(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    return [_plain_option(each) for each in value] if isinstance(value, list | tuple) else value


def _plain_vary(vary: Any) -> Any:
    """Terms as text: one, a list, or lists by level, whatever held them."""
    if vary is None or isinstance(vary, str):
        return vary
    if isinstance(vary, Mapping):
        return {level: _plain_vary(names) for level, names in vary.items()}
    return [str(name) for name in vary]


def _plain_id(key: Any) -> Any:
    """An id as JSON: a date, which JSON lacks, as an object."""
    plain = key.item() if isinstance(key, np.generic) else key
    return {"date": plain.isoformat()} if isinstance(plain, date) else plain


def _id_from_plain(plain: Any) -> Any:
    return date.fromisoformat(plain["date"]) if isinstance(plain, Mapping) else plain
