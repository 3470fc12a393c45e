"""What the estimators share: the specification as parameters, fitting, predicting, saving."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import narwhals as nw
import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted, validate_data

from covey._typing import Anything, Floats
from covey.errors import DataError, SolverError, listing, one_of
from covey.estimators.uncertainty import Uncertain
from covey.fitting.fit import fit
from covey.losses import Loss, Reduction, family_of
from covey.model.files import save_model
from covey.model.model import Model
from covey.model.summary import describe
from covey.nodes.network import InMemory
from covey.problem.problem import Arrays, Spec, as_frame, read_rows, resolve
from covey.problem.settings import COLUMNS, Penalties, declared
from covey.solvers import Convergence
from covey.solvers.ledger import Ledger
from covey.tree.hierarchy import UNSEEN, Level, Unseen, to_array

# Settings that an estimator has under the same name; it has ``random_state`` for the seed, and a family of its own.
SETTINGS = tuple(name for name in declared() if name not in ("family", "nested", "seed"))
DEFAULTS: dict[str, Any] = {
    **{name: declared()[name].default for name in SETTINGS},
    "loss": None,
    "unseen": "parent",
    "random_state": 0,
}

PARAMETERS = """
    Parameters
    ----------
    client, cluster : str, int or None
        The columns of ``X`` that say whose row it is and which cluster that client is in: names for a data frame,
        positions for an array. Leave them None and pass arrays to ``fit`` and ``predict`` instead. Without clusters
        all clients are in one.
    formula : str or None
        Terms by formula, such as ``"log(x) + zone * year"`` (categories are coded, an intercept is included); with
        a left-hand side, ``"y ~ x"``, the response is taken from the frame too. None takes every other column of ``X``.
    loss : str, Loss or None
        A loss of one's own (:func:`covey.losses.from_functions`), or its name, in place of the estimator's; the ``reduction``
        and the ``ridge`` are the estimator's.
    penalty : {"auto", "reml", "ml", "cv"}
        How the penalties are learned: by restricted or plain maximum likelihood (for classes and counts by Laplace's
        approximation), or, the paper's way, from a grid by cross-validation. ``auto``: REML for the linear model, ML for the
        others; none of it if ``gamma``, ``lam`` or ``alpha`` is given.
    vary : list of terms, mapping from "client" and "cluster" to lists, or None
        Which terms differ by client and by cluster; the others are common to all. None lets all vary. A formula may say it
        instead, as in ``"y ~ x + z + (1 + x | state/county)"``, with ``||`` for no correlations.
    covariance : {None, "isotropic", "diagonal", "full"}, or mapping from "client" and "cluster" to one of them
        One variance for all varying terms (the paper's; columns should be on comparable scales), one for each (the default),
        or correlations too.
    per_cluster : bool
        Learn how clients spread for each cluster on its own (the paper's ``sigma_j``).
    tests : bool
        Test whether clients differ and clusters matter, which takes a fit without each.
    gamma, lam, alpha : number, mapping from ids to numbers, or array
        Given penalties: pull of clients to their cluster (per client or per cluster) and of clusters to the global model
        (per cluster), 1.0 where one is given and not the other. ``alpha`` in [0, 1] may stand in for ``lam``: 0 makes clusters
        independent, 1 makes them one. The pull is the same on every coefficient, so columns should be on comparable scales, by
        ``standardize`` for instance.
    reduction : {"sum", "mean"}
        Whether a client's loss is summed or averaged over its rows before the penalties are added.
    fit_intercept : bool
        Add an intercept, which varies like any other term; a formula says so itself.
    standardize : bool
        Put every term but a constant one about its mean and in units of its standard deviation over all rows, before penalties
        act: the same pull then means the same for all terms. Coefficients are per standard deviation; ``predict`` takes rows as
        they are. Without a constant term nothing is centred.
    weights, offset : str, int or None
        Columns with row weights and with a known part of the linear predictor.
    baseline : {None, "single-model", "locally-trained", "single-cluster"}
        Fit one of the models the hierarchy is compared with, through the same interface.
    ridge : float
        Pull of every client's coefficients to zero, on top of that to its cluster.
    james_stein : bool
        Shrink the global model to zero by as much as its own uncertainty tells (James-Stein, positive part), the clusters and
        clients being the best given it. It lowers the expected error of the global model where there are more than two
        coefficients whose true values are near zero, the intercept among them, if the penalties are about right; row
        weights count as precisions. For the Gaussian loss it costs a network no further exchange.
    solver : {"auto", "sweep", "newton", "l2gd", "al2sgd_plus", "one_coin"}
        ``sweep`` is exact for the Gaussian loss, ``newton`` serves any; the others are the paper's randomised algorithms.
        ``auto`` takes ``sweep`` for a quadratic loss and ``newton`` for any other; ``covey.plan`` shows what each would cost.
    options : mapping or None
        Keywords of the randomised algorithms: ``steps``, ``eta``, ``p0``, ``p``, ``tau``, ``rho``, ``mu``, ``L``, ``vote``,
        ``every``, ``checkpoint``, ``minimum``; see the functions in ``covey.solvers``.
    unseen : {"parent", "raise"}
        What ``predict`` does for a client or cluster that training did not see: use the model one level up, or raise.
    tol, max_iter : float, int or None
        With given penalties: Newton stops when the gradient norm is below ``tol``; the randomised algorithms when the objective
        is certified to be within ``tol`` (relative) of its minimum. ``max_iter`` is 100 for Newton by default, for the others
        twice the theorem's number but at most a million; a warning says when that was not enough.
    random_state : int
        Seed of the randomised algorithms, and of the folds by which the single-cluster baseline chooses its penalty.

    Attributes
    ----------
    coef_ : (n_clients, n_terms), cluster_coef_ : (n_clusters, n_terms), global_coef_ : (n_terms,)
        Coefficients at each level, in the order of ``clients_``, ``clusters_`` and ``terms_``.
    convergence_ : Convergence
        How the solver stopped: gradient norm, certified gap, message.
    history_, ledger_
        Of an iterative solver: a frame with a row for each check, and what crossed each link.
"""


class Hierarchical(Uncertain, BaseEstimator):
    """The estimator of any family."""

    _family: ClassVar[str]

    if TYPE_CHECKING:  # for editors and type checkers; at run time the parameters are the settings, and a test compares them

        def __init__(
            self,
            *,
            client: str | int | None = None,
            cluster: str | int | None = None,
            weights: str | int | None = None,
            offset: str | int | None = None,
            formula: str | None = None,
            fit_intercept: bool = True,
            standardize: bool = False,
            gamma: Any = None,
            lam: Any = None,
            alpha: Any = None,
            penalty: Penalties = "auto",
            vary: Any = None,
            covariance: Any = None,
            per_cluster: bool = False,
            tests: bool = True,
            reduction: Reduction = "sum",
            ridge: float = 0.0,
            james_stein: bool = False,
            baseline: str | None = None,
            solver: str = "auto",
            options: Mapping[str, Any] | None = None,
            tol: float = 1e-8,
            max_iter: int | None = None,
            loss: str | Loss | None = None,
            unseen: Unseen = "parent",
            random_state: int = 0,
        ) -> None:
            self.client, self.cluster, self.weights, self.offset = client, cluster, weights, offset
            self.formula, self.loss, self.unseen, self.random_state = formula, loss, unseen, random_state

    else:

        def __init__(self, **settings: Any) -> None:
            odd = [name for name in settings if name not in DEFAULTS]
            if odd:
                raise TypeError(f"{type(self).__name__} has no parameter {odd[0]!r}; it takes {listing(DEFAULTS, 40)}.")
            for name, default in DEFAULTS.items():
                setattr(self, name, settings.get(name, default))

    def fit(
        self,
        X: Any,
        y: Any = None,
        client: Any = None,
        cluster: Any = None,
        sample_weight: Any = None,
        offset: Any = None,
    ) -> Any:
        """Fit every client's, every cluster's and the global model.

        Parameters
        ----------
        X : data frame or (n_rows, n_features) array
        y : (n_rows,) response; None if the formula names it
        client, cluster, sample_weight, offset : (n_rows,) arrays, where they are not columns of ``X``
        """
        draft = resolve(self._spec())
        if y is None and (draft.formula is None or draft.formula.response is None):
            raise DataError(f"{type(self).__name__} requires y to be passed, but the target y is None.")
        if draft.spec.client is None and client is None and self.client is None and self.cluster is None and cluster is None:
            warnings.warn(
                "No clients were named, so all rows count as one client's and there is one model; name a column with client=, "
                "or pass client= to fit.",
                UserWarning,
                stacklevel=2,
            )
        columns = None
        if draft.spec.named:
            frame = as_frame(X)
            self.feature_names_in_ = np.array(frame.columns, dtype=object)
            self.n_features_in_ = len(frame.columns)
            self._library_ = frame.implementation
            given = {"client": client, "cluster": cluster, "weights": sample_weight, "offset": offset}
        else:
            X, given = self._split_off(X, client=client, cluster=cluster, weights=sample_weight, offset=offset)
            X, y = self._validate(X, y)
            kept = [at for at in range(X.shape[1] + len(self._positions())) if at not in self._positions().values()]
            columns = getattr(self, "feature_names_in_", [f"x{at}" for at in kept])
        data, problem = read_rows(X, draft, Arrays(y, **given), columns)
        return self._adopt(fit(InMemory.of(data, problem.loss), problem))

    def predict(self, X: Any, client: Any = None, cluster: Any = None, offset: Any = None, level: Level = "client") -> Anything:
        """The expected response of each row, by the client's own model or by that of a coarser ``level``."""
        return self._mean(X, client, cluster, offset, level)

    def _native(self, frame: Any) -> Any:
        """A frame in the library of the one that was fitted; polars if that was none."""
        library: Any = getattr(self, "_library_", nw.Implementation.POLARS)
        if library is nw.Implementation.POLARS:
            return frame
        return nw.from_dict(frame.to_dict(as_series=False), backend=library).to_native()

    def save(self, path: str | Path, *, sums: bool = True) -> Path:
        """Write the model to a folder, as JSON and Parquet; ``covey.load`` reads it back, without the solver's history.

        ``sums`` are what intervals and updates are made of, of each client ``X'X`` and ``X'y``. For a client with very few rows
        they tell as much as the rows do: leave them out of a model that leaves the house.
        """
        check_is_fitted(self, "model_")
        names = getattr(self, "feature_names_in_", None)
        extra = {"unseen": self.unseen, "n_features": int(self.n_features_in_), "positions": self._positions()}
        return save_model(self.model_, path, sums=sums, extra={**extra, "features": None if names is None else names.tolist()})

    def __str__(self) -> str:
        return describe(self.model_) if hasattr(self, "model_") else repr(self)

    @property
    def coef_(self) -> Floats:
        return self._fitted.theta

    @property
    def cluster_coef_(self) -> Floats:
        return self._fitted.w

    @property
    def global_coef_(self) -> Floats:
        return self._fitted.wbar

    @property
    def terms_(self) -> tuple[str, ...]:
        return self._fitted.terms

    @property
    def clients_(self) -> Anything:
        return to_array(self._fitted.hierarchy.client_ids)

    @property
    def clusters_(self) -> Anything:
        return to_array(self._fitted.hierarchy.cluster_ids)

    @property
    def convergence_(self) -> Convergence:
        return self._fitted.convergence

    @property
    def history_(self) -> Any:
        return None if self._fitted.history is None else self._native(self._fitted.history)

    @property
    def ledger_(self) -> Ledger | None:
        return self._fitted.ledger

    @property
    def n_iter_(self) -> int:
        return max(1, self._fitted.convergence.iterations)

    def _spec(self) -> Spec:
        if self.unseen not in UNSEEN:
            raise one_of("unseen", self.unseen, UNSEEN)
        positions = self._positions()
        if positions and (self.formula is not None or any(isinstance(value, str) for value in self._named_columns().values())):
            raise DataError(f"The {next(iter(positions))!r} parameter is a position, others are names; use names for all.")
        if len(set(positions.values())) < len(positions):
            raise DataError(f"The parameters {listing(positions)} name the same column; each needs its own.")
        names: dict[str, Any] = {name: value for name, value in self._named_columns().items() if isinstance(value, str)}
        settings: dict[str, Any] = {name: _plain(getattr(self, name)) for name in SETTINGS if name not in COLUMNS}
        return Spec(family=self._loss_name(), seed=_plain(self.random_state), **settings, **names)

    def _loss_name(self) -> str:
        """The name of the loss: the estimator's own family, or one that stands in for it."""
        own, family = family_of(self._family), family_of(self._family if self.loss is None else self.loss)
        if family.two_classes != own.two_classes:
            kind = "two classes" if family.two_classes else "numbers"
            raise SolverError(f"The loss {family.name!r} is for {kind}; {type(self).__name__} is not.")
        return family.name

    def _named_columns(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in COLUMNS}

    def _positions(self) -> dict[str, int]:
        return {name: int(value) for name, value in self._named_columns().items() if isinstance(value, int | np.integer)}

    def _split_off(self, X: Any, **given: Any) -> tuple[Any, dict[str, Any]]:
        """Take ids, weights and offset out of a plain array by position; arrays that are given come first."""
        positions = self._positions()
        if not positions:
            return X, given
        if isinstance(nw.from_native(X, eager_only=True, pass_through=True), nw.DataFrame):
            raise DataError(
                f"X is a data frame: give the {next(iter(positions))!r} parameter as a column's name, not a position."
            )
        X = np.asarray(X, dtype=object)
        if X.ndim != 2:
            raise DataError(f"X must have two dimensions, rows and columns; got shape {X.shape}.")
        width = X.shape[1]
        for name, at in positions.items():
            if not 0 <= at < width:
                raise DataError(f"The {name!r} parameter is column {at}, but X has {width} columns, counted from 0.")
            if given[name] is None:
                given[name] = X[:, at] if name in ("client", "cluster") else X[:, at].astype(np.float64)
        kept = np.delete(X, sorted(set(positions.values())), axis=1)
        try:
            return kept.astype(np.float64), given
        except (TypeError, ValueError) as problem:
            raise DataError(
                f"X holds values that are not numbers ({problem}); name columns of a data frame to use a formula."
            ) from None

    def _validate(self, X: Any, y: Any) -> tuple[Floats, Any]:
        # Values that are not finite are refused later, by column and client.
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True, ensure_all_finite=False)
        return X, y

    def _adopt(self, model: Model) -> Any:
        self.model_ = model
        return self

    def _mean(self, X: Any, client: Any, cluster: Any, offset: Any, level: Level) -> Floats:
        check_is_fitted(self, "model_")
        return self.model_.mean(self._margin(X, client, cluster, offset, level))

    def _margin(self, X: Any, client: Any, cluster: Any, offset: Any, level: Level) -> Floats:
        check_is_fitted(self, "model_")
        X, client, cluster, offset, _ = self._plain_rows(X, client, cluster, offset)
        return self.model_.margin(X, client=client, cluster=cluster, offset=offset, level=level, unseen=self.unseen)[0]


# scikit-learn reads the parameters from the signature; they are those of the settings.
_SELF = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
Hierarchical.__init__.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [_SELF, *(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value) for name, value in DEFAULTS.items())]
)


def _plain(value: Any) -> Any:
    """A number of numpy's as Python's own, which JSON can hold."""
    return value.item() if isinstance(value, np.generic) else value
