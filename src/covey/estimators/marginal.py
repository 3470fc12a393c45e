"""A fitted model for the Python package marginaleffects: average predictions, comparisons and slopes of the global model.

marginaleffects computes standard errors from the derivatives of predictions in the coefficients, and needs the coefficients,
their covariance and the columns. It takes objects of its class ``ModelAbstract``, which :func:`adapter` makes. The package is
imported only there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from covey.errors import CoveyError, DataError, did_you_mean
from covey.model.means import Scale
from covey.model.robust import sandwich
from covey.problem.problem import as_frame
from covey.tables.design import Formula
from covey.tables.rows import side_by_side
from covey.tables.scaling import Scaled
from covey.tables.sparse import NOT_SPARSE, SparseDesign

if TYPE_CHECKING:
    from covey.model.model import Model


def adapter(model: Model, data: Any, scale: Scale) -> Any:
    """The object that marginaleffects takes in place of a model of statsmodels."""
    try:
        from marginaleffects.classes import ModelAbstract, ModelVault
    except ImportError:
        raise CoveyError("This needs the package marginaleffects, version 0.6 or newer: pip install marginaleffects") from None
    if isinstance(model.design, SparseDesign):
        raise DataError(NOT_SPARSE)
    design = model.design.inner if isinstance(model.design, Scaled) else model.design
    levels: Mapping[str, Sequence[Any]] = design.levels if isinstance(design, Formula) else {}
    loss, covariance = model.problem.loss, model.posterior.learned.covariance

    class CoveyModel(ModelAbstract):
        """Predictions by the global model, at a random effect of zero."""

        def get_vcov(self, vcov: Any = True) -> Any:
            if isinstance(vcov, bool):
                return covariance.copy() if vcov else None
            return sandwich(model.posterior, model.wbar, vcov).covariance

        def get_exog(self, newdata: pl.DataFrame) -> Any:
            rows = newdata.select(design.columns).with_columns(_as_fitted(newdata[name], levels[name]) for name in levels)
            return side_by_side(model.design.blocks(as_frame(rows)))

        def get_predict(self, params: Any, newdata: Any) -> pl.DataFrame:
            margin = np.asarray(newdata) @ np.asarray(params)
            estimate = margin if scale == "link" else loss.mean(margin)
            return pl.DataFrame({"rowid": np.arange(len(estimate), dtype=np.int32), "estimate": estimate})

        def find_variables(self) -> list[str]:
            return list(design.columns)

        def find_predictors(self) -> list[str]:
            return list(design.columns)

        def find_response(self) -> None:
            return None

    vault = ModelVault(
        coef=model.wbar.copy(),
        coefnames=np.array(model.terms),
        formula=lambda rows: (None, rows),  # get_exog makes the columns, so nothing is parsed
        modeldata=_table(data, design.columns, levels),
        package="covey",
        vcov=covariance,
    )
    try:
        return CoveyModel(model, vault)
    except (pl.exceptions.PolarsError, AttributeError):
        raise CoveyError(
            f"This version of marginaleffects does not work with polars {pl.__version__}; install polars below 2, which "
            "covey works with too."
        ) from None


def _table(data: Any, columns: Sequence[str], levels: Mapping[str, Sequence[Any]]) -> pl.DataFrame:
    """The rows without missing values in ``columns``, with categories as an ``Enum`` in the order of the model."""
    frame: pl.DataFrame = as_frame(data).to_polars()
    for name in columns:
        if name not in frame.columns:
            raise DataError(f"The table has no column {name!r}; {did_you_mean(name, frame.columns)}")
    rows = frame.drop_nulls(list(columns))
    kinds = {name: pl.Enum([str(level) for level in known]) for name, known in levels.items()}
    return rows.with_columns(pl.Series(name, [str(value) for value in rows[name]], dtype=kind) for name, kind in kinds.items())


def _as_fitted(column: pl.Series, levels: Sequence[Any]) -> pl.Series:
    """Categories as the model has them, from their names."""
    known = {str(level): level for level in levels}
    return pl.Series(column.name, [known.get(str(value), value) for value in column])
