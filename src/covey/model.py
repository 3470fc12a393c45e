"""A specification, and the model that fitting it leaves behind: what predicts, prints and goes to disk.

The scikit-learn estimators and the command line are two faces of this; it needs neither of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import narwhals as nw
import numpy as np
import polars as pl

from covey._typing import Anything, Floats, Ints
from covey.baselines import BASELINES, fit_baseline
from covey.data import GroupedData, refuse_infinite, side_by_side
from covey.design import Columns, Design, Formula, Frame, column, numeric, response, split_formula
from covey.errors import CoveyError, DataError, FormulaError, SolverError, listing, one_of
from covey.hierarchy import Hierarchy, Level, Resolved, Unseen
from covey.labels import is_missing
from covey.ledger import Ledger
from covey.losses import Loss, Reduction, loss_of
from covey.objective import Penalty
from covey.solvers import BY_COINS, Convergence, Fit, Progress, Solver, check_options, solve


@dataclass(frozen=True)
class Spec:
    """Everything that says how to fit, in plain values.

    ``client``, ``cluster``, ``weights`` and ``offset`` name columns of the table; the rest is explained at the estimators.
    """

    family: str = "gaussian"
    client: str | None = None
    cluster: str | None = None
    weights: str | None = None
    offset: str | None = None
    formula: str | None = None
    fit_intercept: bool = True
    gamma: Any = 1.0
    lam: Any = None
    alpha: Any = None
    reduction: Reduction = "sum"
    ridge: float = 0.0
    james_stein: bool = False
    baseline: str | None = None
    solver: Solver = "auto"
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

    def check(self) -> None:
        """Refuse settings that no data could make right."""
        loss_of(self.family, self.reduction, self.ridge)
        check_options(self.solver, self.options)
        if self.baseline is not None and self.baseline not in BASELINES:
            raise one_of("baseline", self.baseline, BASELINES)
        if self.baseline is not None and self.solver in BY_COINS:
            raise SolverError(f"A baseline is solved exactly; leave out solver={self.solver!r} and its options.")
        if not isinstance(self.james_stein, bool | np.bool_):
            raise SolverError(f"The 'james_stein' parameter must be True or False. Got {self.james_stein!r} instead.")
        if self.james_stein and (self.baseline is not None or self.solver in BY_COINS):
            other = f"baseline={self.baseline!r}" if self.baseline is not None else f"solver={self.solver!r}"
            raise SolverError(f"james_stein=True shrinks the global model of an exact hierarchical fit; leave out {other}.")
        if not (isinstance(self.tol, int | float) and self.tol > 0):
            raise SolverError(f"The 'tol' parameter must be a positive number. Got {self.tol!r} instead.")
        if not (isinstance(self.seed, int) and self.seed >= 0):
            raise SolverError(f"The seed (random_state) must be a whole number >= 0. Got {self.seed!r} instead.")
        if not (self.max_iter is None or (isinstance(self.max_iter, int | np.integer) and self.max_iter >= 1)):
            raise SolverError(f"The 'max_iter' parameter must be a whole number >= 1. Got {self.max_iter!r} instead.")


@dataclass(frozen=True)
class Model:
    """A fitted hierarchy: coefficients at three levels, and what is needed to use and to explain them."""

    spec: Spec
    design: Design
    hierarchy: Hierarchy
    theta: Floats
    w: Floats
    wbar: Floats
    rows: Ints
    convergence: Convergence
    penalty: Penalty | None
    classes: Anything | None = None
    has_offset: bool = False
    history: pl.DataFrame | None = None
    ledger: Ledger | None = None

    @property
    def terms(self) -> tuple[str, ...]:
        return self.design.terms

    def margin(
        self,
        X: Any,
        *,
        client: Any = None,
        cluster: Any = None,
        offset: Any = None,
        level: Level = "client",
        unseen: Unseen = "parent",
    ) -> tuple[Floats, Resolved]:
        """``x'theta + offset`` of each row by the model that answers for it, and which one that is."""
        frame = as_frame(X) if self.spec.named else None
        blocks, n_rows = self._blocks(X, frame)
        client = self._ids(client, frame, self.spec.client, needed=level == "client")
        cluster = self._ids(cluster, frame, self.spec.cluster, needed=level != "global" and client is None)
        self._refuse_forgotten(client, cluster, level)
        chosen = self.hierarchy.resolve(client, cluster, n_rows=n_rows, unseen=unseen, level=level)
        rows = side_by_side(blocks)
        refuse_infinite(rows, self.terms, lambda row: f"row {row}")
        # One table of all models, the global one last: index -1 falls on it by itself.
        table = np.concatenate([self.theta, self.w, self.wbar[None]])
        which = np.where(chosen.client >= 0, chosen.client, np.where(chosen.cluster >= 0, chosen.cluster + len(self.theta), -1))
        margin = np.einsum("ld,ld->l", rows, table[which])
        shift = self._offset(offset, frame, n_rows)
        return (margin if shift is None else margin + shift), chosen

    def mean(self, margin: Floats) -> Floats:
        return self.spec.loss.mean(margin)

    def coefficients(self, level: Level = "client") -> pl.DataFrame:
        """The coefficients of one level, a row for each unit and term."""
        d = len(self.terms)
        tree = self.hierarchy
        if level == "global":
            return pl.DataFrame({"term": self.terms, "estimate": self.wbar})
        if level == "cluster":
            ids = {"cluster": tree.cluster_ids, "clients": tree.sizes}
            values = self.w
        elif level == "client":
            ids = {"cluster": tree.cluster_ids.gather(tree.parent), "client": tree.client_ids, "rows": self.rows}
            values = self.theta
        else:
            raise one_of("level", level, ("client", "cluster", "global"))
        index = pl.Series(np.repeat(np.arange(len(values)), d))
        tidy = pl.DataFrame(ids)[index]
        return tidy.with_columns(
            term=pl.Series(list(self.terms) * len(values), dtype=pl.String), estimate=pl.Series(values.ravel())
        )

    def _blocks(self, X: Any, frame: Frame | None) -> tuple[list[Anything], int]:
        if frame is not None:
            if len(frame) == 0:
                raise DataError("The table has no rows to predict.")
            return self.design.blocks(frame), len(frame)
        if not isinstance(self.design, Columns) or not isinstance(X, np.ndarray):
            raise DataError("This model was fitted to plain arrays; read it with covey.load and pass arrays to its predict.")
        return self.design.matrix_blocks(X), len(X)

    def _ids(self, given: Any, frame: Frame | None, name: str | None, needed: bool) -> Any:
        if given is not None or frame is None or name is None:
            return given
        if name not in frame.columns and not needed:
            return None
        return column(frame, name)

    def _refuse_forgotten(self, client: Any, cluster: Any, level: Level) -> None:
        """A model of many clients cannot guess whose row it sees; falling back in silence would hide the mistake."""
        if level == "client" and client is None and cluster is None and self.hierarchy.n_clients > 1:
            raise DataError(
                "This model was fitted to several clients: pass client= (and cluster=) to predict, or level='global'."
            )
        if level == "cluster" and client is None and cluster is None and self.hierarchy.n_clusters > 1:
            raise DataError("This model was fitted to several clusters: pass cluster= to predict, or level='global'.")

    def _offset(self, given: Any, frame: Frame | None, n_rows: int) -> Floats | None:
        if given is None and frame is not None and self.spec.offset is not None:
            given = numeric(frame, self.spec.offset)
        if given is None:
            if self.has_offset:
                raise DataError("This model was fitted with an offset: pass offset= to predict, zeros if there is none.")
            return None
        offset = np.asarray(given, dtype=np.float64)
        if offset.shape != (n_rows,):
            raise DataError(f"The offset has shape {offset.shape} for {n_rows} rows; give one value a row.")
        refuse_infinite(offset[:, None], ["offset"], lambda row: f"row {row}")
        return offset


def as_frame(X: Any) -> Frame:
    """Any eager data frame, through narwhals."""
    frame = nw.from_native(X, eager_only=True, pass_through=True)
    if not isinstance(frame, nw.DataFrame):
        raise DataError(
            f"Columns are named, so X must be a data frame (pandas, polars, pyarrow); got {type(X).__name__}. With "
            "plain arrays, pass client= and cluster= as arrays to fit and predict."
        )
    odd = [name for name in frame.columns if not isinstance(name, str)]
    if odd:
        raise DataError(f"Column names must be text; got {odd[0]!r}: rename the columns, or pass a plain array.")
    return frame


def fit_table(
    X: Any,
    spec: Spec,
    y: Any = None,
    *,
    client: Any = None,
    cluster: Any = None,
    weights: Any = None,
    offset: Any = None,
    progress: Progress | None = None,
) -> Model:
    """Fit a table whose columns are named by the specification; arrays that are given stand in for a column."""
    data, design, classes = read_frame(X, spec, y, client=client, cluster=cluster, weights=weights, offset=offset)
    return fit_grouped(data, design, classes, spec, progress)


def read_frame(
    X: Any, spec: Spec, y: Any = None, *, client: Any = None, cluster: Any = None, weights: Any = None, offset: Any = None
) -> tuple[GroupedData, Design, Anything | None]:
    """The data a specification asks for: sorted and checked, with its design and, for a classifier, the two classes."""
    frame = as_frame(X)
    if len(frame) == 0:
        raise DataError("The table has no rows; covey needs at least one.")
    named = {"client": spec.client, "cluster": spec.cluster, "weights": spec.weights, "offset": spec.offset}
    taken = {name: column(frame, name) for name in named.values() if name is not None}
    lhs, rhs = split_formula(spec.formula) if spec.formula is not None else (None, None)
    if y is None:
        if lhs is None:
            raise DataError("There is no response: pass y, or write it to the left of '~' in the formula.")
        y = response(lhs, frame)
    elif lhs is not None:
        raise FormulaError(f"The response is given twice, as y and as {lhs!r} in the formula; leave one out.")
    design: Design
    if rhs is not None:
        design = Formula.learn(rhs, frame)
        if lhs in design.columns:
            raise FormulaError(f"The response {lhs!r} is also on the right of '~'; a model that knows the answer is of no use.")
    else:
        features = tuple(name for name in frame.columns if name not in taken)
        if "Intercept" in features and spec.fit_intercept:
            raise DataError(
                "The column 'Intercept' has the name of covey's own intercept; rename it, or set fit_intercept=False."
            )
        if not features and not spec.fit_intercept:
            raise DataError("No column is left to learn from; add one, or keep the intercept.")
        design = Columns(features, spec.fit_intercept)
    outcome, classes = encode_response(y, spec.family)

    def pick(given: Any, name: str | None, as_number: bool = False) -> Any:
        if given is not None or name is None:
            return given
        return numeric(frame, name) if as_number else taken[name]

    data = GroupedData.from_blocks(
        design.blocks(frame),
        len(frame),
        outcome,
        pick(client, spec.client),
        pick(cluster, spec.cluster),
        weights=pick(weights, spec.weights, as_number=True),
        offset=pick(offset, spec.offset, as_number=True),
        terms=design.terms,
        check=spec.loss.check,
    )
    return data, design, classes


def fit_matrix(
    X: Floats,
    columns: Sequence[str],
    y: Any,
    spec: Spec,
    *,
    client: Any = None,
    cluster: Any = None,
    weights: Any = None,
    offset: Any = None,
) -> Model:
    """Fit plain arrays."""
    design = Columns(tuple(columns), spec.fit_intercept)
    outcome, classes = encode_response(y, spec.family)
    data = GroupedData.from_blocks(
        design.matrix_blocks(X),
        len(X),
        outcome,
        client,
        cluster,
        weights=weights,
        offset=offset,
        terms=design.terms,
        check=spec.loss.check,
    )
    return fit_grouped(data, design, classes, spec)


def encode_response(y: Any, family: str) -> tuple[Any, Anything | None]:
    """The response as numbers; for a binary family 0 and 1, with the two classes they stand for, in sorted order."""
    series = nw.from_native(y, series_only=True, pass_through=True)
    values = series.to_numpy() if isinstance(series, nw.Series) else np.asarray(y)
    if family != "bernoulli":
        return values, None
    missing = _missing(values)
    if missing.any():
        raise DataError(f"The response is missing (NaN) in row {int(missing.argmax())}; fill the value or leave the row out.")
    try:
        classes, codes = np.unique(values, return_inverse=True)
    except TypeError:
        raise DataError("The response mixes types that cannot be compared; convert its classes to one type.") from None
    if len(classes) == 1:
        raise DataError(f"The response has one class only, {classes.tolist()[0]!r}; a classifier needs rows of two classes.")
    if len(classes) > 2:
        raise DataError(
            f"Only binary classification is supported. The type of the target is multiclass: {listing(classes.tolist(), 5)}; "
            "keep two classes, or fit one against the rest."
        )
    return codes.ravel().astype(np.float64), classes


def _missing(values: Anything) -> Anything:
    if values.dtype.kind == "O":
        return np.array([is_missing(value) for value in values.tolist()])
    return np.isnan(values) if values.dtype.kind == "f" else np.zeros(1, dtype=bool)


def fit_data(data: GroupedData, spec: Spec, progress: Progress | None = None) -> tuple[Fit, Penalty | None]:
    """Solve for data that is already grouped."""
    spec.check()
    loss = spec.loss
    if spec.baseline is not None:
        return fit_baseline(spec.baseline, data, loss, seed=spec.seed, progress=progress), None
    penalty = Penalty.of(data.hierarchy, gamma=spec.gamma, lam=spec.lam, alpha=spec.alpha)
    fit = solve(
        data,
        loss,
        penalty,
        solver=spec.solver,
        tol=spec.tol,
        max_iter=spec.max_iter,
        seed=spec.seed,
        options=spec.options,
        james_stein=spec.james_stein,
        progress=progress,
    )
    if not np.isfinite(fit.theta).all():
        raise CoveyError("The coefficients are not finite; the columns are probably on extreme scales: standardise them.")
    return fit, penalty


def fit_grouped(
    data: GroupedData, design: Design, classes: Anything | None, spec: Spec, progress: Progress | None = None
) -> Model:
    """Fit data that is already grouped, and keep what prediction needs."""
    fit, penalty = fit_data(data, spec, progress)
    return Model(
        spec,
        design,
        data.hierarchy,
        fit.theta,
        fit.w,
        fit.wbar,
        data.rows_per_client,
        fit.convergence,
        penalty,
        classes,
        data.offset is not None,
        fit.history,
        fit.ledger,
    )
