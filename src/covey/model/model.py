"""The model that fitting a specification leaves behind: what predicts, prints and goes to disk.

The scikit-learn estimators and the command line are two faces of this; it needs neither of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import narwhals as nw
import numpy as np
import polars as pl

from covey._typing import Anything, Floats, Ints
from covey.errors import DataError, FormulaError, SolverError, listing, one_of
from covey.fitting.learning import fit_data
from covey.fitting.selection import Count
from covey.losses import Loss
from covey.model.inference import Posterior, quantile
from covey.objective.penalty import Penalty
from covey.problem.spec import Spec
from covey.solvers import Convergence, Progress
from covey.solvers.ledger import Ledger
from covey.tables.bars import compose, repeats, split_bars
from covey.tables.design import Columns, Design, Formula, Frame, Scaled, column, numeric, response, split_formula, unscaled
from covey.tables.rows import GroupedData, refuse_infinite, side_by_side
from covey.tables.scaling import Scale, moments
from covey.tree.hierarchy import Hierarchy, Level, Resolved, Unseen
from covey.tree.ids import is_missing
from covey.variance.components import Learned


@dataclass(frozen=True)
class Elsewhere:
    """Clients whose models are at their sites, and not here: how many each cluster has, ``(k,)``, and how many rows."""

    sites: tuple[str, ...]
    clients: Ints
    rows: Ints


@dataclass(frozen=True)
class Model:
    """A fitted hierarchy: coefficients at three levels, and what is needed to use and to explain them.

    The operator of a fit across sites has a model without clients; ``elsewhere`` then says where they are.
    """

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
    learned: Learned | None = None
    elsewhere: Elsewhere | None = None

    @property
    def clients_of_cluster(self) -> Ints:
        """How many clients each cluster was fitted to, ``(k,)``."""
        return self.hierarchy.sizes if self.elsewhere is None else self.elsewhere.clients

    @property
    def n_rows(self) -> int:
        """How many rows it was fitted to."""
        return int((self.rows if self.elsewhere is None else self.elsewhere.rows).sum())

    @property
    def terms(self) -> tuple[str, ...]:
        return self.design.terms

    @cached_property
    def posterior(self) -> Posterior:
        """What is not known of the coefficients."""
        if self.learned is None:
            raise SolverError(
                "Standard errors and intervals need penalties that were learned from the data of several clients; leave out "
                "gamma, lam, alpha, baseline, penalty='cv', james_stein and solvers by coins."
            )
        return Posterior(self.learned, self.hierarchy, self.terms)

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
        rows, chosen, shift = self.rows_of(X, client=client, cluster=cluster, offset=offset, level=level, unseen=unseen)
        # One table of all models, the global one last: index -1 falls on it by itself.
        table = np.concatenate([self.theta, self.w, self.wbar[None]])
        which = np.where(chosen.client >= 0, chosen.client, np.where(chosen.cluster >= 0, chosen.cluster + len(self.theta), -1))
        margin = np.einsum("ld,ld->l", rows, table[which])
        return (margin if shift is None else margin + shift), chosen

    def rows_of(
        self, X: Any, *, client: Any, cluster: Any, offset: Any, level: Level, unseen: Unseen
    ) -> tuple[Floats, Resolved, Floats | None]:
        """The terms of new rows, which model answers for each, and its offset."""
        frame = as_frame(X) if self.spec.named else None
        blocks, n_rows = self.blocks(X, frame)
        client, cluster = self.ids_of(frame, client, cluster, level)
        self._refuse_forgotten(client, cluster, level)
        chosen = self.hierarchy.resolve(client, cluster, n_rows=n_rows, unseen=unseen, level=level)
        rows = side_by_side(blocks)
        refuse_infinite(rows, self.terms, lambda row: f"row {row}")
        return rows, chosen, self.offset_of(offset, frame, n_rows)

    def ids_of(self, frame: Frame | None, client: Any, cluster: Any, level: Level) -> tuple[Any, Any]:
        """The clients and clusters of new rows: as given, or from the table's columns."""
        client = self._ids(client, frame, self.spec.client, needed=level == "client" and self.elsewhere is None)
        needed = level != "global" and (client is None or bool(self.spec.nested))
        cluster = self._ids(cluster, frame, self.spec.cluster, needed=needed)
        if self.spec.nested and client is not None and cluster is not None:
            client = compose(cluster, client)
        return client, cluster

    def intervals(
        self,
        X: Any,
        *,
        coverage: float = 0.95,
        noise: bool = False,
        client: Any = None,
        cluster: Any = None,
        offset: Any = None,
        level: Level = "client",
        unseen: Unseen = "parent",
    ) -> Floats:
        """Where the expected response of each row lies, ``(rows, 2)``; with ``noise``, where a new response would."""
        where: dict[str, Any] = {"client": client, "cluster": cluster, "offset": offset, "level": level, "unseen": unseen}
        quantile(coverage)
        posterior = self.posterior
        margin, chosen = self.margin(X, **where)
        variance = posterior.margin_variance(self.rows_of(X, **where)[0], chosen, level)
        reach = posterior.reach(coverage, chosen, level)
        if noise:
            return self.spec.loss.response_interval(margin, variance, reach, coverage, self._noise(X))
        half = np.sqrt(reach**2 * variance)
        return self.mean(np.column_stack([margin - half, margin + half]))

    def _noise(self, X: Any) -> Floats:
        """The dispersion of new rows; of a linear model less where the table says that they weigh more."""
        s2, name = self.posterior.learned.dispersion, self.spec.weights
        if name is None or not self.spec.loss.reml or name not in as_frame(X).columns:
            return np.asarray(s2)
        with np.errstate(divide="ignore"):
            return np.asarray(s2 / numeric(as_frame(X), name))

    def mean(self, margin: Floats) -> Floats:
        return self.spec.loss.mean(margin)

    def coefficients(self, level: Level = "client", coverage: float = 0.95) -> pl.DataFrame:
        """The coefficients of one level, a row for each unit and term; with standard errors and intervals if known."""
        tidy = self._coefficients(level)
        quantile(coverage)
        if self.learned is None or not self.learned.knows(level):
            return tidy
        error = self.posterior.standard_errors(level).ravel()
        alone = level == "global" or (level == "cluster" and self.hierarchy.n_clusters == 1)
        reach = error * (quantile(coverage, self.posterior.freedom) if alone else quantile(coverage))
        estimate = tidy["estimate"].to_numpy()
        bounds = {"lower": pl.Series(estimate - reach), "upper": pl.Series(estimate + reach)}
        return tidy.with_columns(std_error=pl.Series(error), **bounds)

    def reliability(self) -> pl.DataFrame:
        """How far each client stands on its own data: a row for each client and varying term, 0 to 1."""
        tidy = self._coefficients("client").drop("estimate")
        tidy = tidy.with_columns(reliability=pl.Series(self.posterior.reliability.ravel()))
        return tidy.filter(pl.col("reliability").is_not_nan())

    def _coefficients(self, level: Level) -> pl.DataFrame:
        d = len(self.terms)
        tree = self.hierarchy
        if level == "global":
            return pl.DataFrame({"term": self.terms, "estimate": self.wbar})
        if level == "cluster":
            ids = {"cluster": tree.cluster_ids, "clients": self.clients_of_cluster}
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

    def blocks(self, X: Any, frame: Frame | None) -> tuple[list[Anything], int]:
        """The columns of new rows, and how many rows there are."""
        if frame is not None:
            if len(frame) == 0:
                raise DataError("The table has no rows to predict.")
            return self.design.blocks(frame), len(frame)
        design = self.design
        of_arrays = isinstance(unscaled(design), Columns) and isinstance(X, np.ndarray)
        if not of_arrays or not isinstance(design, Columns | Scaled):
            raise DataError("This model was fitted to plain arrays; read it with covey.load and pass arrays to its predict.")
        return design.matrix_blocks(X), len(X)

    def response_of(self, frame: Frame | None, y: Any, weights: Any) -> tuple[Any, Any]:
        """The response and weights of new rows: as given, or from the table's columns."""
        lhs = split_formula(self.spec.formula)[0] if self.spec.formula is not None else None
        if y is None and (frame is None or lhs is None):
            raise DataError("There is no response: pass y, or the column to the left of '~' in the formula.")
        y = response(lhs, frame) if y is None and lhs is not None else y
        if weights is None and frame is not None and self.spec.weights is not None:
            weights = numeric(frame, self.spec.weights)
        return y, weights

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

    def offset_of(self, given: Any, frame: Frame | None, n_rows: int) -> Floats | None:
        """The known part of new rows' margins."""
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
    read = read_frame(X, spec, y, client=client, cluster=cluster, weights=weights, offset=offset)
    return fit_grouped(read.data, read.design, read.classes, read.spec, progress)


class Reading(NamedTuple):
    """Data sorted and checked, its design, the two classes of a classifier, and the specification with its columns settled."""

    data: GroupedData
    design: Design
    classes: Anything | None
    spec: Spec


def read_frame(
    X: Any, spec: Spec, y: Any = None, *, client: Any = None, cluster: Any = None, weights: Any = None, offset: Any = None
) -> Reading:
    """The data a specification asks for."""
    spec = spec.settled()
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
    elif lhs is not None and not _same(y, response(lhs, frame)):
        raise FormulaError(f"The response is given twice, as y and as {lhs!r} in the formula, and they differ; leave one out.")
    design: Columns | Formula
    if rhs is not None:
        design = Formula.learn(split_bars(rhs)[0], frame)
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
    outcome, classes = encode_response(y, spec.loss)

    def pick(given: Any, name: str | None, as_number: bool = False) -> Any:
        if given is not None or name is None:
            return given
        return numeric(frame, name) if as_number else taken[name]

    client, cluster = pick(client, spec.client), pick(cluster, spec.cluster)
    nested = bool(spec.nested) and repeats(cluster, client)
    data = GroupedData.from_blocks(
        design.blocks(frame),
        len(frame),
        outcome,
        compose(cluster, client) if nested else client,
        cluster,
        weights=pick(weights, spec.weights, as_number=True),
        offset=pick(offset, spec.offset, as_number=True),
        terms=design.terms,
        check=spec.loss.check,
    )
    return Reading(*_standardized(data, design, spec), classes, replace(spec, nested=nested))


def _standardized(data: GroupedData, design: Columns | Formula, spec: Spec) -> tuple[GroupedData, Design]:
    """Rows and design as they are, or with terms in units of their standard deviations, if that is asked for."""
    if not spec.standardize:
        return data, design
    scale = Scale.of(moments(data.X), data.n_rows, data.terms)
    return scale.rows(data), scale.design(design)


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
    outcome, classes = encode_response(y, spec.loss)
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
    return fit_grouped(*_standardized(data, design, spec), classes, spec)


def series_values(y: Any) -> Anything:
    """A column of any library, or a sequence, as an array."""
    series = nw.from_native(y, series_only=True, pass_through=True)
    return series.to_numpy() if isinstance(series, nw.Series) else np.asarray(y)


def encode_response(y: Any, loss: Loss) -> tuple[Any, Anything | None]:
    """The response as numbers; for a loss of two classes 0 and 1, with the two classes they stand for, in sorted order."""
    values = series_values(y)
    if not loss.two_classes:
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


def encode_known(y: Any, classes: Anything | None) -> Any:
    """New responses as numbers, by the classes that a model knows."""
    values = series_values(y)
    if classes is None:
        return values
    known = np.isin(values, classes)
    if not known.all():
        shown = values.tolist()[int((~known).argmax())]
        raise DataError(f"The response is {shown!r}, which is neither of the model's classes {listing(classes.tolist(), 2)}.")
    return (values == classes[1]).astype(np.float64)


def _same(first: Any, second: Any) -> bool:
    """Whether two columns hold the same values, as when cross-validation passes a response that the formula names too."""
    one, two = (series_values(each) for each in (first, second))
    return one.shape == two.shape and bool((one == two).all())


def _missing(values: Anything) -> Anything:
    if values.dtype.kind == "O":
        return np.array([is_missing(value) for value in values.tolist()])
    return np.isnan(values) if values.dtype.kind == "f" else np.zeros(1, dtype=bool)


def fit_grouped(
    data: GroupedData,
    design: Design,
    classes: Anything | None,
    spec: Spec,
    progress: Progress | None = None,
    count: Count | None = None,
) -> Model:
    """Fit data that is already grouped, by the design that made it so, and keep what prediction needs."""
    spec = spec.settled()
    fitted = fit_data(data, spec, spec.varying(design), progress=progress, count=count)
    fit = fitted.fit
    return Model(
        spec,
        design,
        data.hierarchy,
        fit.theta,
        fit.w,
        fit.wbar,
        data.rows_per_client,
        fit.convergence,
        fitted.penalty,
        classes,
        data.offset is not None,
        fit.history,
        fit.ledger,
        fitted.learned,
    )


def group_rows(
    model: Model, X: Any, y: Any = None, *, client: Any = None, cluster: Any = None, weights: Any = None, offset: Any = None
) -> GroupedData:
    """New rows, coded as the model's own."""
    frame = as_frame(X) if model.spec.named else None
    blocks, n_rows = model.blocks(X, frame)
    client, cluster = model.ids_of(frame, client, cluster, "client")
    if client is None:
        raise DataError("New rows need the ids of their clients; pass client=, or the column that the model knows.")
    if cluster is None and model.hierarchy.n_clusters > 1:
        raise DataError("New rows need the ids of their clusters; pass cluster=, or the column that the model knows.")
    if cluster is None:
        cluster = pl.Series(model.hierarchy.cluster_ids.to_list() * n_rows)
    y, weights = model.response_of(frame, y, weights)
    return GroupedData.from_blocks(
        blocks,
        n_rows,
        encode_known(y, model.classes),
        client,
        cluster,
        weights=weights,
        offset=model.offset_of(offset, frame, n_rows),
        terms=model.terms,
        check=model.spec.loss.check_values,
    )
