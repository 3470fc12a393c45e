"""``model.plot``: pictures of a fitted estimator. matplotlib and :mod:`covey.report` are loaded when one is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sklearn.utils.validation import check_is_fitted

from covey._typing import TableLike
from covey.errors import DataError
from covey.estimators.effects import EffectMethods
from covey.model.new_rows import Observed
from covey.problem.rows import Arrays
from covey.solvers.clock import Mode
from covey.tree.hierarchy import Level

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Plots:
    """Pictures of a fitted model. Each method draws on ``ax``, or on a new figure, and returns the axes.

    The title of a picture is a sentence that states its finding, computed from the model. All methods take ``dark=True`` for
    light lines on a dark ground. With more than a few hundred groups, marks of single groups become bands.

    Parameters
    ----------
    estimator : HierarchicalEstimator
        The fitted estimator.
    """

    def __init__(self, estimator: EffectMethods) -> None:
        self._of = estimator

    def shrinkage(self, ax: Axes | None = None, *, data: TableLike | None = None, dark: bool = False) -> Axes:
        """Draw each client's own mean and its personalised mean against its number of rows.

        Parameters
        ----------
        ax : Axes, optional
            Where to draw; a new figure by default.
        data : data frame, optional
            The rows of the fit. A linear model with an intercept does not need them.
        dark : bool
            Colours for a dark ground.

        Returns
        -------
        Axes
            The axes.
        """
        from covey.report.pictures import shrinkage

        return self._draw(ax, shrinkage(self._of.model_, self._rows(data)), dark)

    def caterpillar(
        self,
        ax: Axes | None = None,
        *,
        level: Level = "client",
        term: str | None = None,
        n: int = 15,
        coverage: float = 0.95,
        dark: bool = False,
    ) -> Axes:
        """Draw the deviations of clients (or clusters) with intervals, sorted; of many, the lowest and the highest.

        Parameters
        ----------
        ax : Axes, optional
            Where to draw; a new figure by default.
        level : {"client", "cluster"}
            Whose deviations.
        term : str, optional
            A term that varies; by default the first.
        n : int
            With more than ``2 n`` groups, the number of lowest and of highest ones that are shown.
        coverage : float
            Coverage of the intervals.
        dark : bool
            Colours for a dark ground.

        Returns
        -------
        Axes
            The axes.
        """
        from covey.report.pictures import caterpillar

        return self._draw(ax, caterpillar(self._of.model_, level, term, n, coverage), dark, (8.0, 6.4))

    def variance(self, ax: Axes | None = None, *, dark: bool = False) -> Axes:
        """Draw the shares of clusters, clients and residual in the variance of a row.

        Parameters
        ----------
        ax : Axes, optional
            Where to draw; a new figure by default.
        dark : bool
            Colours for a dark ground.

        Returns
        -------
        Axes
            The axes.
        """
        from covey.report.pictures import variance_shares

        return self._draw(ax, variance_shares(self._of.model_), dark, (8.0, 3.2))

    def reliability(self, ax: Axes | None = None, *, term: str | None = None, dark: bool = False) -> Axes:
        """Draw how much each client's rows determine its coefficient, against their number.

        Parameters
        ----------
        ax : Axes, optional
            Where to draw; a new figure by default.
        term : str, optional
            A term that varies by client; by default the first.
        dark : bool
            Colours for a dark ground.

        Returns
        -------
        Axes
            The axes.
        """
        from covey.report.pictures import reliability

        return self._draw(ax, reliability(self._of.model_, term), dark)

    def effect(
        self,
        column: str,
        ax: Axes | None = None,
        *,
        data: TableLike | None = None,
        at: Mapping[str, object] | None = None,
        coverage: float = 0.95,
        dark: bool = False,
    ) -> Axes:
        """Draw the prediction along a column: of each client and cluster, and of the global model with its interval.

        Parameters
        ----------
        column : str
            A column of the terms.
        ax : Axes, optional
            Where to draw; a new figure by default.
        data : data frame, optional
            The rows of the fit, for the range of a numeric column; ``at={"x": [low, high]}`` says it too.
        at : mapping from columns to values, optional
            Where to hold the other columns, as in ``means``.
        coverage : float
            Coverage of the interval.
        dark : bool
            Colours for a dark ground.

        Returns
        -------
        Axes
            The axes.
        """
        from covey.report.pictures import effect

        return self._draw(ax, effect(self._of.model_, column, data=data, at=at, coverage=coverage), dark)

    def residuals(
        self,
        data: TableLike,
        ax: Axes | None = None,
        *,
        kind: Literal["fitted", "quantile", "group"] = "fitted",
        dark: bool = False,
    ) -> Axes:
        """Draw residuals against predictions, against the normal distribution, or by client.

        The residuals of the rows of the fit rise a little along the predictions, even if the model is right, because the
        model moves clients with few rows towards the others.

        Parameters
        ----------
        data : data frame
            Rows with their responses.
        ax : Axes, optional
            Where to draw; a new figure by default.
        kind : {"fitted", "quantile", "group"}
            What to draw them against.
        dark : bool
            Colours for a dark ground.

        Returns
        -------
        Axes
            The axes.
        """
        from covey.report.diagnostics import residuals

        return self._draw(ax, residuals(self._of.model_, self._needed(data), kind), dark)

    def calibration(self, data: TableLike, ax: Axes | None = None, *, bins: int = 10, dark: bool = False) -> Axes:
        """Draw the observed shares of the second class against the predicted probabilities; for classifiers.

        Parameters
        ----------
        data : data frame
            Rows with their responses, best such that were not in the fit: for those of the fit the predicted probabilities of
            clients with few rows are closer to each other than the shares, even if the model is right.
        ax : Axes, optional
            Where to draw; a new figure by default.
        bins : int
            The number of groups of rows with similar predictions.
        dark : bool
            Colours for a dark ground.

        Returns
        -------
        Axes
            The axes.
        """
        from covey.report.diagnostics import calibration

        return self._draw(ax, calibration(self._of.model_, self._needed(data), bins), dark)

    def convergence(self, ax: Axes | None = None, *, dark: bool = False) -> Axes:
        """Draw the norm of the gradient at each step of the solver, for fits with given penalties.

        Parameters
        ----------
        ax : Axes, optional
            Where to draw; a new figure by default.
        dark : bool
            Colours for a dark ground.

        Returns
        -------
        Axes
            The axes.
        """
        from covey.report.diagnostics import convergence

        return self._draw(ax, convergence(self._of.model_), dark)

    def exchanges(self, run: Sequence[object] | None = None, ax: Axes | None = None, *, dark: bool = False) -> Axes:
        """Draw the bytes that a federated run sent, by kind of message.

        Parameters
        ----------
        run : sequence of exchanges, optional
            Those of ``simulate_sites(...).outcome.exchanges``. A model that the operator of a fit across sites saved has them.
        ax : Axes, optional
            Where to draw; a new figure by default.
        dark : bool
            Colours for a dark ground.

        Returns
        -------
        Axes
            The axes.
        """
        from covey.report.diagnostics import exchanges

        if run is None:
            run = (getattr(self._of, "_federation_", None) or {}).get("exchanges", ())
        plain: list[Any] = [each if isinstance(each, Mapping) else vars(each) for each in run]
        return self._draw(ax, exchanges(plain), dark)

    def timeline(self, data: TableLike, ax: Axes | None = None, *, mode: Mode = "asynchronous", dark: bool = False) -> Axes:
        """Draw when each cluster computes, sends and waits in a run of ``l2gd`` on these rows; ``covey plan`` has the speeds.

        A model does not keep the times of its clusters, so the picture needs the rows, and times follow from assumed speeds.
        ``l2gd`` fits models in which every term varies, so the formula must have no bars.

        Parameters
        ----------
        data : data frame
            The rows of the fit.
        ax : Axes, optional
            Where to draw; a new figure by default.
        mode : {"lock-step", "rounds", "asynchronous"}
            Who waits for whom: see :mod:`covey.solvers.clock`.
        dark : bool
            Colours for a dark ground.

        Returns
        -------
        Axes
            The axes.
        """
        from covey.report.diagnostics import timeline

        self._needed(data)
        grouped = self._of._group(data, Arrays())
        return self._draw(ax, timeline(self._of.model_, grouped, mode), dark)

    def _rows(self, data: Any) -> Observed | None:
        return None if data is None else self._needed(data)

    def _needed(self, data: Any) -> Observed:
        if not self._of.model_.spec.named:
            raise DataError(
                "This picture needs rows with named columns, and the model was fitted to arrays; fit it to a frame."
            )
        return self._of._observed(data, Arrays(), "client")

    def _draw(self, ax: Axes | None, draw: Any, dark: bool, size: tuple[float, float] = (8.0, 5.0)) -> Axes:
        from covey.report.style import draw_on

        return draw_on(ax, draw, dark=dark, size=size)


class PlotMethods(EffectMethods):
    """Pictures and the report of a fitted estimator."""

    @property
    def plot(self) -> Plots:
        """Pictures of the fitted model: :class:`Plots`."""
        check_is_fitted(self, "model_")
        return Plots(self)

    def report(
        self, path: str | Path, data: TableLike | None = None, *, title: str | None = None, question: str | None = None
    ) -> Path:
        """Write a report of the model: one HTML file that needs no network.

        Parameters
        ----------
        path : str or Path
            The file, such as ``"radon.html"``.
        data : data frame, optional
            The rows of the fit. Held-out errors, residuals and the hash of the data need them; without, the report says so.
        title : str, optional
            The heading; by default the model in words.
        question : str, optional
            The question that the model answers, in your words.

        Returns
        -------
        Path
            The file.

        Examples
        --------
        >>> import tempfile
        >>> from covey import HierarchicalRegressor, datasets
        >>> homes = datasets.load_radon()
        >>> model = HierarchicalRegressor(formula="log_radon ~ floor + (1 | state/county)").fit(homes)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.report(f"{folder}/radon.html").stat().st_size < 3_000_000
        True
        """
        from covey.report.document import report

        check_is_fitted(self, "model_")
        path = Path(path)
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise DataError(f"The report {str(path)!r} must be a file in a folder that exists.")
        if data is not None and not self.model_.spec.named:
            raise DataError(
                "Parts of a report that need rows need named columns, and the model was fitted to arrays; fit a frame."
            )
        text = report(self.model_, data, heading=title, question=question, federation=self._federation_)
        path.write_text(text, encoding="utf-8")
        return path
