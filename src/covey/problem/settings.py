"""The settings of a fit: :class:`Spec`.

Every setting is declared once, with its default, its help on the command line and its type there. The parameters of the
estimators, the options of the commands and the JSON in models and messages are made of these declarations.

This module imports nothing numerical at first, so that ``covey --help`` is fast.
"""

# ruff: noqa: RUF009 - setting() makes a field
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from datetime import date
from typing import TYPE_CHECKING, Any, Literal

from covey.errors import DataError, PenaltyError, SolverError, one_of, whole

if TYPE_CHECKING:
    from covey._typing import Floats
    from covey.losses import Loss

    Pull = float | Sequence[float] | Mapping[Any, float] | Floats
    """A penalty: one number, one for each group in order, or one for each id."""

Penalties = Literal["auto", "reml", "ml", "cv"]
PENALTIES = ("auto", "reml", "ml", "cv")
BASELINES = ("single-model", "locally-trained", "single-cluster")
NA = ("refuse", "drop")
KINDS = ("isotropic", "diagonal", "full")
COLUMNS = ("client", "cluster", "weights", "offset", "frequency", "trials")  # settings that name a column
LEVELS = ("client", "cluster")


def setting(default: Any, help: str = "", shell: Any = None) -> Any:
    """A field of :class:`Spec`: its default, its help on the command line, and its type there (None: no option).

    ``{choices}`` and ``{first_order}`` in the help are replaced by the names of all solvers and of the first-order ones.
    """
    return field(default=default, metadata={"help": help, "shell": shell})


@dataclass(frozen=True)
class Spec:
    """What to fit and how, in plain values.

    The estimators and the commands make a ``Spec`` from their parameters. :func:`covey.fit` and :func:`covey.simulate_sites`
    take one directly.

    Parameters
    ----------
    family : {"gaussian", "bernoulli", "poisson", "gamma"}, or the name of a registered loss
        The distribution of the response: numbers, two classes, counts, or positive numbers.
    client, cluster : str or None
        The columns that hold the ids of the clients (the smaller groups) and of the clusters (groups of clients). Bars in the
        formula can name them instead. Without a cluster column all clients are in one cluster.
    weights, offset : str or None
        The columns that hold the weights of the rows and a known part of the linear predictor. A weight is a precision: the
        variance of a row is the residual variance divided by its weight. The offset may be an expression of columns, such as
        ``"log(expected)"``.
    frequency : str or None
        The column that says how often each row counts: a row with frequency 3 is three equal rows.
    na : {"refuse", "drop"}
        What to do with rows that have missing values in the columns that the model uses: raise an error, or drop and count
        them.
    trials : str or None
        The column that holds the number of trials of each row, of which the response is the share of successes. In a formula,
        ``cbind(successes, failures)`` says the same.
    formula : str or None
        Response and terms, such as ``"y ~ log(x) + zone"``. Bars say which terms vary by which groups, as in
        ``"y ~ x + (1 + x | cluster/client)"``. None takes all other columns as terms.
    fit_intercept : bool
        Add an intercept. A formula decides this itself.
    standardize : bool
        Centre every term that is not constant and divide it by its standard deviation over all rows before penalties act.
        Coefficients are per standard deviation. Without a constant term nothing is centred.
    sparse : bool or None
        Whether the indicators of categories are sparse columns, for categories that are a term by themselves in the formula and
        in no bar, such as ``C(product)``. They are shared: their coefficients do not vary by group. None makes them sparse if
        the formula has bars and a column has more than 500 categories.
    gamma : number, sequence or mapping from ids, or None
        Given penalty that pulls clients towards their cluster: one number, or one for each client or each cluster. None learns
        it from the data, unless ``lam`` or ``alpha`` is given; then it is 1.
    lam : number, sequence or mapping from ids, or None
        Given penalty that pulls clusters towards the global model. It is 1 if only ``gamma`` is given.
    alpha : number, sequence or mapping from ids, or None
        Another way to give ``lam``, as a number from 0 to 1: ``alpha = lam / (lam + g)``, where ``g`` is the sum of ``gamma``
        over the clients of the cluster. 0 makes the clusters independent, 1 makes them equal.
    penalty : {"auto", "reml", "ml", "cv"}
        How the amount of shrinkage is found: variance components by restricted or full maximum likelihood, or penalties by
        cross-validation. ``auto`` takes REML for the Gaussian family and ML for the others.
    vary : list of terms, mapping from "client" and "cluster" to lists, or None
        The terms whose coefficients vary by group. None takes what the bars say. Without bars it means the intercept and each
        term that is not constant within every group; with an isotropic covariance all terms.
    covariance : {"isotropic", "diagonal", "full"}, mapping from "client" and "cluster" to one of them, or None
        The covariance of the varying coefficients: one variance, one variance for each term, or with correlations. None takes
        what the bars say, full for ``|`` and diagonal for ``||``; without bars it is diagonal.
    per_cluster : bool
        Learn a separate variance of the clients in each cluster.
    tests : bool
        Test the variation between clients and between clusters. This takes a further fit for each test.
    nested : bool or None
        Whether a client id is unique only within its cluster, so that a client is a pair of both ids. A formula with
        ``cluster/client`` always means this.
    reduction : {"sum", "mean"}
        Whether the loss of a client is the sum or the mean over its rows.
    ridge : float
        Penalty that pulls the coefficients of every client towards zero.
    james_stein : bool
        Multiply the global coefficients by the positive-part James-Stein factor, a number from 0 to 1.
    baseline : {"single-model", "locally-trained", "single-cluster"} or None
        Fit a simpler model for comparison: one model for all rows, one for each client alone, or all clients in one cluster.
    solver : str
        ``"auto"``, ``"sweep"`` (exact, Gaussian only), ``"newton"``, ``"apgd"``, or a randomised algorithm: ``"proxskip"``,
        ``"l2gd"``, ``"al2sgd_plus"``, ``"one_coin"``.
    options : mapping or None
        Options of the solver by name, such as ``{"p0": 0.1}`` for ``l2gd``.
    tol : float
        Newton stops when the gradient norm is below ``tol``. The other iterative solvers stop once an upper bound on ``F - F*``
        is at most ``tol * (F - F0)``: ``F`` is the present value of the objective, ``F*`` its minimum, and ``F0`` the lowest
        loss that the rows can have, without penalties (0 for a linear model). The bound is proven, except for ``apgd`` without
        its option ``mu``, where it is an estimate. The search for variances does not use ``tol``.
    max_iter : int or None
        The largest number of iterations of the solver; None takes its default. The search for variances has limits of its own.
    seed : int
        Seed of all random choices.

    Examples
    --------
    >>> from covey import Spec
    >>> spec = Spec(formula="log_radon ~ floor + (1 | state/county)", tests=False)
    >>> spec.learns
    'reml'
    """

    family: str = setting("gaussian", "gaussian (numbers), bernoulli (two classes), poisson (counts) or gamma (positive).", str)
    client: str | None = setting(None, "Column with the ids of clients, the smaller groups.", str | None)
    cluster: str | None = setting(None, "Column with the ids of clusters, the groups of clients.", str | None)
    weights: str | None = setting(None, "Column with row weights (precisions; --frequency is for counts).", str | None)
    offset: str | None = setting(
        None, "Known part of the linear predictor: a column, or an expression such as 'log(expected)'.", str | None
    )
    frequency: str | None = setting(None, "Column that says how often each row counts.", str | None)
    na: Literal["refuse", "drop"] = setting("refuse", "Rows with missing values: 'refuse' them, or 'drop' and count them.", str)
    trials: str | None = setting(None, "Column with numbers of trials; the response is the share of successes.", str | None)
    formula: str | None = setting(None, "Response and terms: 'y ~ log(x) + zone', 'y ~ x + (x | cluster/client)'.", str)
    fit_intercept: bool = setting(True)
    standardize: bool = setting(False, "Subtract the mean of each term and divide by its standard deviation.", bool)
    sparse: bool | None = setting(None)
    gamma: Pull | None = setting(None, "Pull of clients towards their cluster, if it is not to be learned.", float | None)
    lam: Pull | None = setting(None, "Pull of clusters towards the global model (1 with --gamma).", float | None)
    alpha: Pull | None = setting(None, "Instead of --lam: 0 for independent clusters, 1 for one cluster.", float | None)
    penalty: Penalties = setting("auto", "How to learn penalties: reml, ml or cv.", str)
    vary: Sequence[str] | Mapping[str, Sequence[str]] | None = setting(
        None,
        "A term that varies by group; repeat for more. Default: the bars, or terms not constant in groups.",
        list[str] | None,
    )
    covariance: str | Mapping[str, str | None] | None = setting(
        None, "Covariance of varying terms: isotropic, diagonal or full. Default: as the bars say, or diagonal.", str | None
    )
    per_cluster: bool = setting(False, "Learn a separate variance of the clients in each cluster.", bool)
    tests: bool = setting(True, "Test the variation between clients and between clusters.", bool)
    nested: bool | None = setting(None)
    reduction: Literal["sum", "mean"] = setting("sum", "Take the 'sum' or the 'mean' of the loss over a client's rows.", str)
    ridge: float = setting(0.0, "Pull of the coefficients of every client towards zero.", float)
    james_stein: bool = setting(False, "Shrink the global model towards zero by its uncertainty (more than two terms).", bool)
    baseline: str | None = setting(None, "Fit single-model, locally-trained or single-cluster instead.", str | None)
    solver: str = setting("auto", "One of {choices}.", str)
    options: Mapping[str, Any] | None = setting(None, "Option of {first_order}: p0=0.1; may be repeated.", list[str] | None)
    tol: float = setting(1e-8, "Stop at this gradient norm (newton) or gap (first-order algorithms).", float)
    max_iter: int | None = setting(None, "Largest number of iterations.", int | None)
    seed: int = setting(0, "Seed of random choices.", int)

    @property
    def loss(self) -> Loss:
        """The loss of the family, with its reduction and ridge."""
        from covey.losses import loss_of

        return loss_of(self.family, self.reduction, self.ridge)

    @property
    def named(self) -> bool:
        """Whether columns are found by name, in a table, rather than by position."""
        return any(getattr(self, name) is not None for name in (*COLUMNS, "formula"))

    @property
    def learns(self) -> str | None:
        """How penalties are learned: ``"reml"``, ``"ml"`` or ``"cv"``; None if they are given, or for a baseline."""
        from covey.losses import family_of

        if self.baseline is not None:
            return None
        if self.penalty != "auto":
            return self.penalty
        if any(value is not None for value in (self.gamma, self.lam, self.alpha)):
            return None
        return "reml" if family_of(self.family).reml else "ml"

    @property
    def by_likelihood(self) -> bool:
        """Whether penalties are learned by maximum likelihood."""
        return self.learns in ("reml", "ml")

    @property
    def wants_sparse(self) -> bool | None:
        """``sparse``, but False instead of None if other settings need dense columns."""
        dense = self.standardize or self.james_stein or self.options or self.solver not in ("auto", "sweep", "newton")
        return False if self.sparse is None and (dense or (self.loss.dispersion and not self.loss.reml)) else self.sparse

    @property
    def kinds(self) -> dict[str, str | None]:
        """The kind of covariance at each level; None if it is not given."""
        asked = self.covariance
        by_level = asked if isinstance(asked, Mapping) else dict.fromkeys(LEVELS, asked)
        for level, kind in by_level.items():
            if level not in LEVELS:
                raise PenaltyError(f"The 'covariance' parameter has the key {level!r}; its levels are 'client' and 'cluster'.")
            if kind is not None and kind not in KINDS:
                raise one_of("covariance", kind, KINDS)
        return {level: by_level.get(level) for level in LEVELS}

    def check(self) -> None:
        """Raise an error for a setting that is wrong for any data; the options of solvers are not checked here."""
        import numpy as np

        self._check_penalties()
        for name in COLUMNS:
            column_name(name, getattr(self, name))
        if self.na not in NA:
            raise one_of("na", self.na, NA)
        for name in ("james_stein", "standardize", "per_cluster", "tests"):
            if not isinstance(getattr(self, name), bool | np.bool_):
                raise SolverError(f"The {name!r} parameter must be True or False. Got {getattr(self, name)!r} instead.")
        if self.sparse not in (None, True, False):
            raise SolverError(f"The 'sparse' parameter must be True, False or None. Got {self.sparse!r} instead.")
        if self.baseline is not None and self.baseline not in BASELINES:
            raise one_of("baseline", self.baseline, BASELINES)
        if self.james_stein and self.baseline is not None:
            raise SolverError(
                f"james_stein=True shrinks the global model of a hierarchical fit; leave out baseline={self.baseline!r}."
            )
        if not (isinstance(self.tol, int | float) and self.tol > 0):
            raise SolverError(f"The 'tol' parameter must be a positive number. Got {self.tol!r} instead.")
        if not (isinstance(self.seed, int) and self.seed >= 0):
            raise SolverError(f"The seed (random_state) must be a whole number >= 0. Got {self.seed!r} instead.")
        if self.trials is not None and not self.loss.two_classes:
            raise SolverError(f"trials= is for the bernoulli family, not {self.family}; leave it out, or choose that family.")
        if self.trials is not None and self.weights is not None:
            raise SolverError("With trials= every row is weighted by its number of trials already; leave out weights=.")
        if self.max_iter is not None:
            whole("max_iter", self.max_iter, least=1)

    def _check_penalties(self) -> None:
        """Refuse settings of the penalties that contradict each other."""
        loss = self.loss
        if self.penalty not in PENALTIES:
            raise one_of("penalty", self.penalty, PENALTIES)
        if self.penalty == "reml" and not loss.reml:
            raise PenaltyError(f"penalty='reml' is for the gaussian family; for {self.family} use penalty='ml'.")
        given = [name for name in ("gamma", "lam", "alpha", "baseline") if getattr(self, name) is not None]
        if self.penalty != "auto" and given:
            raise PenaltyError(f"penalty={self.penalty!r} chooses the penalties itself; leave out {given[0]}=.")
        if any(self.kinds.values()) and self.james_stein:
            self.check_isotropic("james_stein=True")
        for name, value in (("vary", self.vary), ("covariance", self.covariance), ("per_cluster", self.per_cluster or None)):
            if value is not None and not self.by_likelihood:
                instead = f"{given[0]}=" if given else f"penalty={self.penalty!r}"
                raise PenaltyError(
                    f"{name}= says which variances are learned from the likelihood, but with {instead} no variance is learned; "
                    "leave out one of the two."
                )
        no_likelihood = {
            f"loss={self.family!r}": not loss.likelihood,
            "reduction='mean'": self.reduction == "mean",
            f"ridge={self.ridge!r}": self.ridge,
        }
        for what, wrong in no_likelihood.items():
            if wrong and self.by_likelihood:
                raise PenaltyError(f"With {what} there is no likelihood to learn penalties from; give gamma, or penalty='cv'.")

    def check_isotropic(self, why: str) -> None:
        """Refuse a covariance that needs more than one penalty for all terms; ``why`` names the setting that forbids it."""
        if any(self.kinds.values()) and set(self.kinds.values()) != {"isotropic"}:
            raise PenaltyError(f"{why} uses one penalty for all terms; leave out covariance=, or set it to 'isotropic'.")

    def to_json(self) -> dict[str, Any]:
        """The settings as JSON, by name."""
        plain = {name: getattr(self, name) for name in declared()}
        penalties = {name: _plain_penalty(plain[name]) for name in ("gamma", "lam", "alpha")}
        # A checkpoint is a file of the machine that fitted, so it is left out.
        options = {name: value for name, value in (self.options or {}).items() if name != "checkpoint"}
        plain_options = None if self.options is None else {name: _plain_option(value) for name, value in options.items()}
        return {**plain, **penalties, "vary": _plain_vary(self.vary), "options": plain_options}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Spec:
        """Read settings from JSON without checking them; a missing setting gets its default."""
        penalties = {name: _penalty_from_plain(plain.get(name)) for name in ("gamma", "lam", "alpha")}
        return cls(**{**plain, **penalties})


def column_name(name: str, value: object) -> None:
    """Refuse a setting that should name one column and does not."""
    if value is not None and not isinstance(value, str):
        got = " ".join(repr(value).split())
        got = got if len(got) < 48 else f"{got[:44]} ..."
        raise DataError(
            f"The {name!r} parameter must be the name of one column. Got {got} instead; "
            "values for each row are arguments of fit, such as fit(X, y, client=ids)."
        )


def declared() -> dict[str, Field[Any]]:
    """The declaration of each setting by name: a field with ``default`` and ``metadata``."""
    return {part.name: part for part in fields(Spec)}


def _plain_penalty(value: Any) -> Any:
    """A penalty as JSON: a number, a list, or pairs of id and value; JSON has no infinity, so it is text."""
    import numpy as np

    if value is None:
        return None
    if isinstance(value, Mapping):
        return {"pairs": [[_plain_id(key), _plain_penalty(item)] for key, item in value.items()]}
    if np.ndim(value) == 1:
        return [_plain_penalty(item) for item in value]
    return "inf" if math.isinf(value) else float(value)


def _penalty_from_plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_id_from_plain(key): _penalty_from_plain(item) for key, item in value["pairs"]}
    if isinstance(value, list | tuple):  # a tuple if it came in a message
        return [_penalty_from_plain(item) for item in value]
    return math.inf if value == "inf" else value


def _plain_option(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    return [_plain_option(each) for each in value] if isinstance(value, list | tuple) else value


def _plain_vary(vary: Any) -> Any:
    if vary is None or isinstance(vary, str):
        return vary
    if isinstance(vary, Mapping):
        return {level: _plain_vary(names) for level, names in vary.items()}
    return [str(name) for name in vary]


def _plain_id(key: Any) -> Any:
    """An id as JSON, or a pair of ids; JSON has no dates, so a date is an object."""
    if isinstance(key, tuple):
        return [_plain_id(part) for part in key]
    plain = key.item() if hasattr(key, "item") else key
    return {"date": plain.isoformat()} if isinstance(plain, date) else plain


def _id_from_plain(plain: Any) -> Any:
    if isinstance(plain, list | tuple):
        return tuple(_id_from_plain(part) for part in plain)
    return date.fromisoformat(plain["date"]) if isinstance(plain, Mapping) else plain
