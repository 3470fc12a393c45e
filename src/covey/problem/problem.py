"""From :class:`Spec`, what a user writes, to :class:`Problem`, what a solver needs.

:func:`resolve` checks a :class:`Spec` and parses its formula. Without a table the result is a draft, which names the columns
it needs. The columns' categories and classes, read here or agreed on by sites, complete it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import date
from functools import cached_property
from typing import Any

import numpy as np

from covey._typing import Anything
from covey.errors import FormulaError, ModelError, PenaltyError, SolverError, one_of
from covey.losses import Loss, family_of, loss_of
from covey.problem.settings import BASELINES, KINDS, PENALTIES, Settings
from covey.tables.bars import Grouping, Vary, levels, vary_from_bars, vary_from_setting
from covey.tables.design import Columns, Design, Formula, design_from_json, unscaled
from covey.tables.formula import ParsedFormula, parse_formula
from covey.tables.scaling import Scale

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


@dataclass(frozen=True)
class Classes:
    """The two classes of a binary response, in sorted order, and the type they had."""

    values: tuple[Any, ...]
    dtype: str

    @classmethod
    def of(cls, classes: Anything | None) -> Classes | None:
        return None if classes is None else cls(tuple(classes.tolist()), str(classes.dtype))

    @property
    def array(self) -> Anything:
        kind = np.dtype(self.dtype).kind
        # The length of text is that of the values: a document from elsewhere could name one that fills the memory.
        return np.array(self.values, dtype=kind if kind in "US" else np.dtype(self.dtype))

    def to_json(self) -> dict[str, Any]:
        if np.dtype(self.dtype).kind not in "OUSbiuf" or not all(isinstance(each, str | int | float) for each in self.values):
            raise ModelError(f"Classes of type {self.dtype} cannot be saved; use text, numbers or booleans.")
        return {"dtype": self.dtype, "values": list(self.values)}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Classes:
        return cls(tuple(plain["values"]), str(plain["dtype"]))


@dataclass(frozen=True)
class Schema:
    """What a table's columns hold.

    Attributes
    ----------
    columns : those that the terms are made of
    categories : of each of them that holds some, in order
    classes : of a binary response
    nested : whether clients' ids have a meaning only within their cluster; None without a cluster column
    has_offset : whether rows have a known part of their linear predictor
    """

    columns: tuple[str, ...]
    categories: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    classes: Classes | None = None
    nested: bool | None = None
    has_offset: bool = False


@dataclass(frozen=True)
class Problem:
    """A checked specification, its parsed formula and, unless it is a draft, the design of its terms and the classes.

    ``spec`` names the client and cluster columns even where only the formula's bars did.

    >>> from covey.problem.problem import Spec
    >>> problem = resolve(Spec(formula="y ~ x + (1 | state/county)"), Schema(("x",), nested=False))
    >>> problem.spec.client, problem.terms, problem.vary.client
    ('county', ('Intercept', 'x'), ('Intercept',))
    >>> Problem.from_json(problem.to_json()) == problem
    True
    """

    spec: Spec
    formula: ParsedFormula | None = None
    agreed_design: Design | None = None
    classes: Classes | None = None
    has_offset: bool = False

    @property
    def draft(self) -> bool:
        """Whether columns and categories are still to be agreed on."""
        return self.agreed_design is None

    @property
    def design(self) -> Design:
        if self.agreed_design is None:
            raise FormulaError("The categories of this problem's columns are not known yet; agree on them first.")
        return self.agreed_design

    @property
    def terms(self) -> tuple[str, ...]:
        return self.design.terms

    @property
    def loss(self) -> Loss:
        return self.spec.loss

    @property
    def groups(self) -> Grouping:
        return Grouping(self.spec.client, self.spec.cluster, bool(self.spec.nested))

    @property
    def has_bars(self) -> bool:
        """Whether the formula says which terms vary."""
        return self.formula is not None and bool(self.formula.bars)

    @cached_property
    def vary(self) -> Vary:
        """Which terms vary at each level."""
        plain = unscaled(self.design)
        if self.has_bars and isinstance(plain, Formula) and self.formula is not None:
            return vary_from_bars(self.formula.bars, self.groups, plain)
        return vary_from_setting(self.spec.vary, self.terms)

    def agree(self, schema: Schema) -> Problem:
        """The problem that a draft becomes once its columns are known."""
        design: Design
        if self.formula is None:
            design = Columns(schema.columns, self.spec.fit_intercept)
        else:
            design = Formula.of(self.formula.common, schema.columns, schema.categories)
        return self.of_design(design, schema.classes, schema.has_offset, schema.nested)

    def of_design(self, design: Design, classes: Classes | None, has_offset: bool, nested: bool | None) -> Problem:
        """The problem with a design that is known already, as that of a model on disk."""
        return Problem(replace(self.spec, nested=nested), self.formula, design, classes, has_offset)

    def scaled(self, scale: Scale) -> Problem:
        """The same problem of standardised terms."""
        design = unscaled(self.design)
        if not isinstance(design, Columns | Formula):
            raise FormulaError("The terms of this problem cannot be standardised.")
        return replace(self, agreed_design=scale.design(design))

    def to_json(self) -> dict[str, Any]:
        """Plain values, from which :meth:`from_json` makes the same problem without parsing any text."""
        return {
            "spec": self.spec.to_json(),
            "formula": None if self.formula is None else self.formula.to_json(),
            "design": None if self.agreed_design is None else self.agreed_design.to_json(),
            "classes": None if self.classes is None else self.classes.to_json(),
            "has_offset": self.has_offset,
        }

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Problem:
        """A problem from elsewhere; its settings and every piece of its formula are checked."""
        spec = Spec.from_json(plain["spec"])
        spec.check()
        formula = None if plain["formula"] is None else ParsedFormula.from_json(plain["formula"])
        rhs = None if formula is None else formula.common
        design = None if plain["design"] is None else design_from_json(plain["design"], rhs)
        classes = None if plain["classes"] is None else Classes.from_json(plain["classes"])
        return cls(_grouped(spec, formula), formula, design, classes, bool(plain["has_offset"]))


def resolve(spec: Spec, schema: Schema | None = None) -> Problem:
    """The one way from settings to a problem: settings checked, the formula parsed, client and cluster columns known.

    Without a ``schema`` the problem is a draft; :meth:`Problem.agree` completes it.
    """
    spec.check()
    formula = None if spec.formula is None else parse_formula(spec.formula)
    draft = Problem(_grouped(spec, formula), formula)
    return draft if schema is None else draft.agree(schema)


def _grouped(spec: Spec, formula: ParsedFormula | None) -> Spec:
    """With client and cluster as the formula's bars name them, if it has any."""
    if formula is None or not formula.bars:
        return spec
    if spec.vary is not None:
        raise FormulaError("The formula's bars say what varies, and so does vary=; leave one out.")
    if not spec.by_likelihood:
        raise FormulaError(
            "The formula's bars say what is to be learned from the data; leave out gamma, lam, alpha, baseline and "
            "penalty='cv'."
        )
    grouping = levels(formula.bars, spec.client, spec.cluster)
    nested = grouping.nested if spec.nested is None else spec.nested
    return replace(spec, client=grouping.client, cluster=grouping.cluster, nested=nested)
