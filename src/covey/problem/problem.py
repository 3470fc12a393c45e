"""A problem: what a specification means for a table, resolved once.

:func:`resolve` checks a :class:`Spec` and parses its formula. Without a table that leaves a draft, which says what columns are
needed; the columns' categories and classes, here or agreed on by sites, make it a problem that can be fitted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from covey._typing import Anything
from covey.errors import FormulaError, ModelError
from covey.losses import Loss
from covey.problem.spec import Spec
from covey.tables.bars import Grouping, Vary, levels, vary_from_bars, vary_from_setting
from covey.tables.design import Columns, Design, Formula, design_from_json, unscaled
from covey.tables.formula import ParsedFormula, parse_formula
from covey.tables.scaling import Scale


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

    >>> from covey.problem.spec import Spec
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
