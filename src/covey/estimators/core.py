"""Parameters of the estimators, and what all their methods need: the specification, the rows, the fitted model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

import narwhals as nw
import numpy as np
import polars as pl
from narwhals.typing import IntoDataFrame
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from covey._typing import Anything, Floats, PenaltyLike, RandomState
from covey.errors import DataError, SolverError, listing, one_of
from covey.losses import Loss, Reduction, family_of
from covey.model.model import Model
from covey.problem.problem import Spec, refuse_odd_table
from covey.problem.settings import COLUMNS, Penalties, column_name, declared
from covey.solvers.registry import first_order
from covey.tables.sparse import SparseMatrix
from covey.threads import use_threads
from covey.tree.hierarchy import UNSEEN, Level, Unseen

# The settings of a Spec that are parameters of an estimator with the same name.
SETTINGS = tuple(name for name in declared() if name not in ("family", "nested", "seed"))


class EstimatorCore:
    """Parameters of every estimator.

    A client is a group with a model of its own: a school, a county, a patient, a shop. A cluster is a known group of clients: a
    district, a state, a hospital, a chain. "The paper" is Lyu, Hanzely and Kolar (2022), arXiv:2204.13619.

    Parameters
    ----------
    client, cluster : str, int or None
        Columns of ``X`` with the ids of clients and clusters: names for a data frame, positions for an array. A formula with
        bars names them instead. Leave them None to pass arrays to ``fit`` and ``predict``. Without ``cluster`` there is one
        grouping: clients and the global model.
    weights, offset : str, int or None
        Columns of ``X`` with row weights and with an offset, which is added to the linear predictor. Cross-validation splits
        them with the rows of ``X``. You can pass the arrays ``sample_weight`` and ``offset`` to ``fit`` instead. A weight
        multiplies the loss of its row: in the linear model the variance of the row is the residual variance divided by its
        weight. A weight is no count: the number of rows stays the same. The offset may also be an expression of
        columns, ``"log(expected)"``, or stand in the formula, ``offset(log(expected))``.
    frequency : str, int or None
        Column of ``X`` that says how often each row counts: a row with frequency 3 is three equal rows, in the likelihood, in
        degrees of freedom and in the number of rows. Or pass the array ``frequency`` to ``fit``.
    na : {"refuse", "drop"}
        Rows with missing values in the columns that the model uses, including response and ids: raise an error, or drop them
        and say how many in the summary. New rows to predict need all values of the terms; a
        missing id counts as unseen.
    trials : str, int or None
        Column of ``X`` with the number of trials of each row, for a classifier. The response is then the share of successes.
        In a formula, ``"cbind(successes, failures) ~ x"`` says the same. You can pass the array ``trials`` to ``fit`` instead.
    formula : str or None
        The terms, such as ``"log(x) + zone * year"``. Categories are coded and an intercept is included. With a left-hand side,
        ``"y ~ x"``, the formula also names the response. Bars say which terms vary by group, as in lme4:
        ``"y ~ x + z + (1 + x | state/county)"``; ``||`` leaves out correlations. A term that only a bar names varies about
        zero. None takes every other column of ``X``.
    fit_intercept : bool
        Add an intercept, which varies like any other term. A formula decides this itself.
    sparse : bool or None
        Keep the categories of a formula as sparse columns: those that are a term by themselves and in no bar, such as
        ``C(product)`` in ``"y ~ x + C(product) + (1 + x | g/i)"``. Their coefficients do not vary by group. None does so if the
        formula has bars and the column has more than 500 categories. A sparse matrix ``X`` is used as it is.
    standardize : bool
        Centre every term that is not constant and divide it by its standard deviation over all rows before penalties act. A
        penalty then means the same for all terms. Coefficients are per standard deviation; ``predict`` takes rows as they are.
        Without a constant term nothing is centred.
    gamma, lam, alpha : number, mapping from ids to numbers, array or None
        Penalties that you choose yourself. ``gamma`` pulls clients to their cluster (one number for all, or by client or
        cluster). ``lam`` pulls clusters to the global model. ``alpha`` in [0, 1] may replace ``lam``: 0 makes clusters
        independent, 1 makes them equal. If one of the three is given, nothing is learned: a missing ``gamma`` is then
        1.0, and so is a missing ``lam`` unless ``alpha`` is given. The penalty is the same for every coefficient, so columns
        should be on comparable scales.
    penalty : {"auto", "reml", "ml", "cv"}
        How the amount of shrinkage is found. ``"reml"`` and ``"ml"`` estimate variance components: they maximise the restricted
        or the full likelihood (Laplace's approximation where the model is not linear). ``"cv"`` chooses the penalties ``gamma``
        and ``lam`` from a grid by cross-validation, as the paper does, and gives no standard errors. ``"auto"`` is REML for the
        linear model and ML for the others; it learns nothing if ``gamma``, ``lam`` or ``alpha`` is given. A penalty (``gamma``,
        ``lam``) is the residual variance (1 in a logistic or Poisson model, the dispersion in a Gamma model) divided by a
        random-effect variance.
    vary : list of terms, mapping from "client" and "cluster" to lists, or None
        Terms that differ by client and by cluster. The others are common to all. None takes what the bars say;
        without bars all terms vary, except that a term (other than the intercept) that is constant within every client or
        cluster does not vary there. With an isotropic covariance it does.
    covariance : {None, "isotropic", "diagonal", "full"}, or mapping from "client" and "cluster" to one of them
        Covariance of the varying terms: one variance for all of them (the paper's model), one for each, or correlations too.
        None takes what the bars say, full for ``|`` and diagonal for ``||``; without bars it is diagonal.
    per_cluster : bool
        Learn a separate client variance for each cluster (``sigma_j`` of the paper).
    tests : bool
        Test the variation between clients and between clusters by likelihood ratio. Each test takes one more fit.
    reduction : {"sum", "mean"}
        Whether the loss of a client is the sum or the mean over its rows.
    ridge : float
        Penalty that pulls the coefficients of every client to zero, in addition to the others.
    james_stein : bool
        Multiply the global coefficients by the positive-part James-Stein factor, a number from 0 to 1. With more than two
        coefficients and penalties that are about right, this lowers their expected squared error, most if the true
        coefficients are near zero. Row weights count as precisions.
    baseline : {None, "single-model", "locally-trained", "single-cluster"}
        Fit a simpler model for comparison: one model for all rows, one for each client alone, or clients without clusters.
    solver : {"auto", "sweep", "newton", "apgd", "proxskip", "l2gd", "al2sgd_plus", "one_coin"}
        ``"sweep"`` is exact for the linear model, ``"newton"`` fits any family, and ``"auto"`` takes one of the two; leave it
        there unless you study algorithms or communication. ``"apgd"`` exchanges vectors only. The randomised algorithms (the
        last four) iterate with vectors, but exchange matrices to measure ``mu``, the smallest curvature of the objective.
        Across sites ``"auto"`` takes ``"apgd"`` if the matrices of all clusters exceed 32 MB or a site sends vectors only.
        :func:`covey.plan` shows what each would cost on a network.
    options : mapping or None
        Options of the solver by name, such as ``{"p0": 0.1}`` for ``"l2gd"``. The functions in :mod:`covey.solvers` explain
        them.
    tol : float
        Newton stops when the gradient norm is below ``tol``. The other iterative solvers stop once an upper bound on ``F - F*``
        is at most ``tol * (F - F0)``: ``F`` is the present value of the objective, ``F*`` its minimum, and ``F0`` the lowest
        loss that the rows can have, without penalties (0 for a linear model). The bound is proven, except for ``"apgd"``
        without its option ``mu``, where it is an estimate. The search for variances does not use ``tol``.
    max_iter : int or None
        The most iterations of the solver; the search for variances has limits of its own. None is 100 for Newton, 10,000 for
        ``"apgd"``, and for the randomised algorithms twice the number that their theorem gives, but at least 1,000 and at most
        a million. A warning says if the limit was reached.
    loss : str, Loss or None
        A loss that replaces the one of the estimator: its name, or what :func:`covey.losses.from_functions` returns.
    unseen : {"parent", "raise"}
        What ``predict`` does for a client or cluster that was not in the training rows: use the model one level up, or raise.
    random_state : int, RandomState or None
        Random numbers of the randomised algorithms, of the folds of cross-validation, of the bootstrap, of ``simulate`` and of
        quantile residuals. With an int every call gives the same result, with None a different one. Other fits are
        deterministic and ignore it. A model of :func:`covey.fit` has the ``seed`` of its ``Spec``, 0 by default.
    threads : int or None
        The number of threads. None is the number in the environment variable ``COVEY_THREADS``, or else as many as processors
        are free at the moment. Results have the same bits for any number.

    Attributes
    ----------
    coef_ : (n_clients, n_terms) array
        Coefficients of the clients, in the order of ``clients_`` and ``terms_``: the whole model of each client, not its
        deviation. A term that does not vary has the global coefficient. Deviations are in :meth:`random_effects`.
    terms_ : tuple of str
        Names of the terms.
    clients_, client_clusters_ : (n_clients,) arrays
        The id of each client and that of its cluster, in the types of the columns. With ``cluster/client`` in the formula a
        client id is unique only within its cluster, so that the pair identifies a client.
    cluster_coef_ : (n_clusters, n_terms) array
        Coefficients of the clusters, in the order of ``clusters_``.
    global_coef_ : (n_terms,) array
        Coefficients of the global model (fixed effects).
    cov_ : (n_terms, n_terms) array
        Covariance matrix of ``global_coef_``, if variances were learned.
    shared_coef_, shared_terms_ : (n_sparse,) array and tuple of str
        Coefficients and names of sparse columns, which are the same for all clients. ``coef_`` and ``terms_`` do not have
        them. Only a fit with sparse columns has these.
    components_ : Components
        Variance components, log-likelihood and tests, if the penalties were learned by likelihood.
    convergence_ : Convergence
        How the solver stopped: gradient norm, certified gap, message.
    history_ : data frame or None
        One row for each step of the sweep or of Newton, or for each check of a randomised algorithm: objective, gradient norm,
        certified gap, exchanges and bytes so far. None if the variances were learned.
    ledger_ : Ledger or None
        Exchanges and bytes within clusters and between them that a network would need. None if the variances were learned.
    """

    _family: ClassVar[str]
    n_features_in_: int
    _federation_: dict[str, Any] | None = None  # the run that a model of an operator or a site comes from
    feature_names_in_: Anything

    def __init__(
        self,
        *,
        client: str | int | None = None,
        cluster: str | int | None = None,
        weights: str | int | None = None,
        offset: str | int | None = None,
        frequency: str | int | None = None,
        na: Literal["refuse", "drop"] = "refuse",
        trials: str | int | None = None,
        formula: str | None = None,
        fit_intercept: bool = True,
        sparse: bool | None = None,
        standardize: bool = False,
        gamma: PenaltyLike | None = None,
        lam: PenaltyLike | None = None,
        alpha: PenaltyLike | None = None,
        penalty: Penalties = "auto",
        vary: str | Sequence[str] | Mapping[str, Sequence[str]] | None = None,
        covariance: str | Mapping[str, str] | None = None,
        per_cluster: bool = False,
        tests: bool = True,
        reduction: Reduction = "sum",
        ridge: float = 0.0,
        james_stein: bool = False,
        baseline: str | None = None,
        solver: str = "auto",
        options: Mapping[str, object] | None = None,
        tol: float = 1e-8,
        max_iter: int | None = None,
        loss: str | Loss | None = None,
        unseen: Unseen = "parent",
        random_state: RandomState = None,
        threads: int | None = None,
    ) -> None:
        self.client, self.cluster, self.weights, self.offset = client, cluster, weights, offset
        self.frequency, self.trials, self.na = frequency, trials, na
        self.formula, self.fit_intercept, self.standardize = formula, fit_intercept, standardize
        self.sparse = sparse
        self.gamma, self.lam, self.alpha, self.penalty = gamma, lam, alpha, penalty
        self.vary, self.covariance, self.per_cluster, self.tests = vary, covariance, per_cluster, tests
        self.reduction, self.ridge, self.james_stein, self.baseline = reduction, ridge, james_stein, baseline
        self.solver, self.options, self.tol, self.max_iter = solver, options, tol, max_iter
        self.loss, self.unseen, self.random_state, self.threads = loss, unseen, random_state, threads

    @property
    def _fitted(self) -> Model:
        if "model_" not in self.__dict__:
            raise AttributeError(f"This {type(self).__name__} is not fitted yet; call fit first.")
        return self.model_

    @property
    def clients_(self) -> Anything:
        """The id of each client, ``(n_clients,)``."""
        return self._fitted.hierarchy.clients

    @property
    def clusters_(self) -> Anything:
        """The id of each cluster, ``(n_clusters,)``."""
        return self._fitted.hierarchy.clusters

    @property
    def client_clusters_(self) -> Anything:
        """The id of each client's cluster, ``(n_clients,)``."""
        return self._fitted.hierarchy.clusters_of_clients

    def _spec(self) -> Spec:
        if self.unseen not in UNSEEN:
            raise one_of("unseen", self.unseen, UNSEEN)
        for name in COLUMNS:
            if not isinstance(getattr(self, name), int | np.integer):
                column_name(name, getattr(self, name))
        named, positions = self._columns(str), self._positions()
        if positions and (self.formula is not None or named):
            raise DataError(f"The {next(iter(positions))!r} parameter is a position, others are names; use names for all.")
        if len(set(positions.values())) < len(positions):
            raise DataError(f"The parameters {listing(positions)} name the same column; each needs its own.")
        settings: dict[str, Any] = {name: _plain(getattr(self, name)) for name in SETTINGS if name not in COLUMNS}
        random = self.solver in first_order() or self.penalty == "cv" or self.baseline == "single-cluster"
        seed = self._seed() if random or self.random_state is not None else 0
        return Spec(family=self._loss_name(), seed=seed, **settings, **named)

    def _seed(self) -> int:
        if isinstance(self.random_state, np.random.RandomState | None):
            return int(check_random_state(self.random_state).randint(2**31 - 1))
        return _plain(self.random_state)  # type: ignore[no-any-return]

    def _loss_name(self) -> str:
        """The name of the loss: the family of the estimator, or the loss that replaces it."""
        own, family = family_of(self._family), family_of(self._family if self.loss is None else self.loss)
        if family.two_classes != own.two_classes:
            kind = "two classes" if family.two_classes else "numbers"
            raise SolverError(f"The loss {family.name!r} is for {kind}; {type(self).__name__} is not.")
        return family.name

    def _columns(self, kind: Any) -> dict[str, Any]:
        """The columns that are given as text or as positions."""
        return {name: getattr(self, name) for name in COLUMNS if isinstance(getattr(self, name), kind)}

    def _positions(self) -> dict[str, int]:
        return {name: int(at) for name, at in self._columns(int | np.integer).items()}

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
            if name in given and given[name] is None:
                given[name] = X[:, at] if name in ("client", "cluster") else X[:, at].astype(np.float64)
        kept = np.delete(X, sorted(set(positions.values())), axis=1)
        try:
            return kept.astype(np.float64), given
        except (TypeError, ValueError) as problem:
            raise DataError(
                f"X holds values that are not numbers ({problem}); pass a data frame and name its columns to use a formula."
            ) from None

    def _rows(self, X: Any, **given: Any) -> tuple[Any, dict[str, Any]]:
        """Rows for the fitted model, with ids, weights and offset; plain arrays are split, a frame stays as it is."""
        check_is_fitted(self, "model_")
        if self.model_.spec.named:
            return X, given
        if not isinstance(X, SparseMatrix) or self.model_.problem.sparse is None:
            refuse_odd_table(X)
            X, given = self._split_off(X, **given)
        sparse = "csr" if isinstance(X, SparseMatrix) else False
        return validate_data(self, X, dtype=np.float64, accept_sparse=sparse, ensure_all_finite=False, reset=False), given

    def _margin(self, X: Any, client: Any, cluster: Any, offset: Any, level: Level) -> Floats:
        X, given = self._rows(X, client=client, cluster=cluster, offset=offset)
        with use_threads(self.threads):
            return self.model_.margin(X, **given, level=level, unseen=self.unseen)[0]

    def _response(self, X: Any, client: Any, cluster: Any, offset: Any, level: Level, expected: bool) -> Floats:
        X, given = self._rows(X, client=client, cluster=cluster, offset=offset)
        with use_threads(self.threads):
            return self.model_.response(X, **given, level=level, unseen=self.unseen, expected=expected)[1]

    def _native(self, frame: pl.DataFrame) -> IntoDataFrame:
        """A frame in the library of the fitted frame; polars after a fit to arrays."""
        library: Any = getattr(self, "_library_", nw.Implementation.POLARS)
        if library is nw.Implementation.POLARS:
            return frame
        return nw.from_dict(frame.to_dict(as_series=False), backend=library).to_native()  # type: ignore[no-any-return]

    def _adopt(self, model: Model) -> Self:
        self.model_, self.terms_ = model, model.terms
        self.coef_, self.cluster_coef_, self.global_coef_ = model.theta, model.w, model.wbar
        if model.shared is not None:
            self.shared_coef_, self.shared_terms_ = model.shared.beta, model.shared.terms
        self.convergence_, self.ledger_ = model.convergence, model.ledger
        self.history_ = None if model.history is None else self._native(model.history)
        self.n_iter_ = max(1, model.convergence.iterations)
        return self


def _plain(value: Any) -> Any:
    """A number of numpy as one of Python, which JSON can hold."""
    return value.item() if isinstance(value, np.generic) else value
