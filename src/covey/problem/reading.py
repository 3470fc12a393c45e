"""Rows of a problem: what its columns hold, and the rows sorted, checked and coded as its design says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import narwhals as nw
import numpy as np

from covey._typing import Anything
from covey.errors import DataError, FormulaError, listing
from covey.losses import Loss
from covey.problem.problem import Classes, Problem, Schema, Spec
from covey.tables.bars import compose, repeats
from covey.tables.design import Columns, Frame, Scaled, column, inspect, numeric, response, unscaled
from covey.tables.rows import GroupedData
from covey.tables.scaling import Scale, moments
from covey.tree.hierarchy import is_missing


@dataclass(frozen=True)
class Arrays:
    """Arrays that are given beside a table, one value a row; each stands in for the column that a specification names."""

    y: Any = None
    client: Any = None
    cluster: Any = None
    weights: Any = None
    offset: Any = None


def read_rows(
    X: Any, draft: Problem, arrays: Arrays | None = None, columns: Sequence[str] | None = None
) -> tuple[GroupedData, Problem]:
    """The rows that a draft asks for, sorted and checked, and the problem that it becomes.

    Parameters
    ----------
    X : a data frame; or a matrix, whose ``columns`` are then named
    """
    given = Arrays() if arrays is None else arrays
    frame = as_frame(X) if columns is None else None
    if len(X if frame is None else frame) == 0:
        raise DataError("The table has no rows; covey needs at least one.")
    named = _from_columns(frame, draft.spec, given)
    y = given.y if frame is None else _response(frame, draft, given.y)
    names, categories = _columns(frame, draft, columns)
    outcome, classes = encode_response(y, draft.loss)
    nested = None if frame is None else bool(draft.spec.nested) and repeats(named.cluster, named.client)
    problem = draft.agree(Schema(names, categories, Classes.of(classes), nested, named.offset is not None))
    data = GroupedData.from_blocks(
        blocks_of(problem, X, frame),
        len(X if frame is None else frame),
        outcome,
        compose(named.cluster, named.client) if nested else named.client,
        named.cluster,
        weights=named.weights,
        offset=named.offset,
        terms=problem.terms,
        check=problem.loss.check,
    )
    if not problem.spec.standardize:
        return data, problem
    scale = Scale.of(moments(data.X), data.n_rows, data.terms)
    return scale.rows(data), problem.scaled(scale)


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


def blocks_of(problem: Problem, X: Any, frame: Frame | None) -> list[Anything]:
    """The terms' columns of some rows, of a frame or of a plain matrix."""
    design = problem.design
    if frame is not None:
        return design.blocks(frame)
    of_arrays = isinstance(unscaled(design), Columns) and isinstance(X, np.ndarray)
    if not of_arrays or not isinstance(design, Columns | Scaled):
        raise DataError("This model was fitted to plain arrays; read it with covey.load and pass arrays to its predict.")
    return design.matrix_blocks(X)


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


def _from_columns(frame: Frame | None, spec: Spec, given: Arrays) -> Arrays:
    """Ids, weights and offset: as given, or from the columns that a specification names."""
    if frame is None:
        return given
    taken = {name: column(frame, name) for name in _taken(spec)}
    values = {"client": spec.client, "cluster": spec.cluster, "weights": spec.weights, "offset": spec.offset}
    for what, name in values.items():
        if getattr(given, what) is None and name is not None:
            given = replace(given, **{what: taken[name] if what in ("client", "cluster") else numeric(frame, name)})
    return given


def _taken(spec: Spec) -> list[str]:
    """Columns that hold no terms."""
    return [name for name in (spec.client, spec.cluster, spec.weights, spec.offset) if name is not None]


def _response(frame: Frame, draft: Problem, y: Any) -> Any:
    """The response: as given, or from the formula, and the same if both have one."""
    formula = draft.formula
    if formula is None or formula.response is None:
        if y is None:
            raise DataError("There is no response: pass y, or write it to the left of '~' in the formula.")
        return y
    named = response(formula, frame)
    if y is not None and not _same(y, named):
        raise FormulaError(
            f"The response is given twice, as y and as {formula.response!r} in the formula, and they differ; leave one out."
        )
    return named if y is None else y


def _columns(
    frame: Frame | None, draft: Problem, columns: Sequence[str] | None
) -> tuple[tuple[str, ...], dict[str, list[Any]]]:
    """The columns of the terms, and their categories."""
    spec, formula = draft.spec, draft.formula
    if frame is None:
        return tuple(columns or ()), {}
    if formula is not None:
        found = inspect(formula.common, frame)
        if formula.response in found[0]:
            raise FormulaError(
                f"The response {formula.response!r} is also on the right of '~'; a model that knows the answer is of no use."
            )
        return found
    features = tuple(name for name in frame.columns if name not in _taken(spec))
    if "Intercept" in features and spec.fit_intercept:
        raise DataError("The column 'Intercept' has the name of covey's own intercept; rename it, or set fit_intercept=False.")
    if not features and not spec.fit_intercept:
        raise DataError("No column is left to learn from; add one, or keep the intercept.")
    return features, {}


def _same(first: Any, second: Any) -> bool:
    """Whether two columns hold the same values, as when cross-validation passes a response that the formula names too."""
    one, two = (series_values(each) for each in (first, second))
    return one.shape == two.shape and bool((one == two).all())


def _missing(values: Anything) -> Anything:
    if values.dtype.kind == "O":
        return np.array([is_missing(value) for value in values.tolist()])
    return np.isnan(values) if values.dtype.kind == "f" else np.zeros(1, dtype=bool)
