"""The criterion that the search minimises, and the one of a linear hierarchy: REML or ML, with its gradient.

:class:`Criterion` is twice a negative log-likelihood, as a function of one vector of parameters. The vector begins with the
parameters of the clients' and the clusters' covariances (:class:`.Parameters`). A linear model needs no others: its global
model and its residual variance are profiled out, as in lme4 (Bates et al. 2015). :mod:`.laplace_likelihood` has the criterion
for the other families.

The linear hierarchy, with its coefficients integrated out, is

    y_i = X_i theta_i + e,   theta_i ~ N(w_j, s2 S_j),   w_j ~ N(wbar, s2 S),   e ~ N(0, s2)

Covariances are relative to the residual variance ``s2``, whose best value is ``Q / dof`` (Pinheiro and Bates 2000, chapter 2).
Twice the negative log-likelihood is then

    dof (log(2 pi s2) + 1) + sum_i log|I + A_i S_j| + sum_j log|I + C_j S| [+ log|sum_j D_j|, REML] - sum log(weights)

where ``Q`` is the least value of the penalised sum of squares, ``dof`` the number of rows [less the terms, REML], ``A_i`` is
``X_i'X_i``, ``C_i = (I + A_i S_j)^-1 A_i``, ``C_j`` the sum of the cluster's ``C_i``, and ``D_j = (I + C_j S)^-1 C_j``.
One sweep gives all of it. The gradient in ``S_j`` is the sum over the cluster's clients of

    bend - pull = (C_i - C_i P_j C_i) - f_i f_i' / s2

where ``f_i`` is the force ``S_j^-1 (theta_i - w_j)`` that ties a client to its cluster, and ``P_j`` the posterior covariance of
``w_j``. ``bend`` comes from the determinants and keeps variances small; ``pull`` comes from the sum of squares and makes them
grow. The gradient in ``S`` is the same one level up.

    before the search                see :mod:`.identify`
    IntegrateClients   node          gets    S_j; sends by cluster the sums of C_i, r_i, c_i and rows, and over all its clients
                                             the sum of log-determinants log|I + A_i S_j|
                       coordinator   solves  w, P, s2
    LikelihoodSlope    node          gets    w, P; sends the sums of bend and of pull
    FinishLinear       node          gets    S_j, w; keeps its clients' models, sends how many of them are not finite

Several points that do not depend on each other, such as those of a Hessian by differences, take two exchanges together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np

from covey._typing import Floats, Ints
from covey.errors import SolverError
from covey.nodes.network import Message, Node, Sizes
from covey.records import Axes, Reply
from covey.solvers.direct.elimination import (
    ClientMarginal,
    Marginal,
    Quadratic,
    invert,
    solve_symmetric,
)
from covey.solvers.direct.factors import Factors
from covey.solvers.direct.hessians import Hessians, WholeHessians, given
from covey.solvers.direct.lanes import StackedMarginal
from covey.solvers.direct.spaces import space_of
from covey.solvers.result import Progress, SharedCoefficients
from covey.variance.columns import (
    ClientSums,
    LearningState,
    NonFiniteClients,
    Slopes,
    Survey,
    TermOrder,
    client_losses,
    client_rows,
    client_spread,
    from_cache,
    keep_results,
    losses_in_space,
    working_columns,
)
from covey.variance.components import Method
from covey.variance.parameters import Parameters, Shape
from covey.variance.upper import UpperPosterior, upper

_LOST_DIGITS = 1e-7  # share of the sum of squares about the pooled fit
AT_ONCE = 1 << 24  # numbers that nodes keep of their clients for points that are evaluated together


@dataclass(frozen=True)
class Evaluation:
    """The criterion at one point, its derivatives, and the upper levels there. Terms are in the working order.

    Attributes
    ----------
    value : twice the negative log-likelihood
    client_slope, cluster_slope : (1 or k, width, width) and (1, d, d), the derivatives in the covariances, ``bend - pull``
    global_slope : (d,) the derivative in the global model; (0,) for a linear model, where it is profiled out
    pull : for clients and for clusters, the part of these derivatives that makes variances grow. In a linear model
        ``-pull / dof`` is the derivative of the logarithm of the residual variance
    top : the upper levels
    """

    value: float
    client_slope: Floats
    cluster_slope: Floats
    global_slope: Floats
    pull: tuple[Floats, Floats]
    top: UpperPosterior


class Criterion(ABC):
    """Twice the negative log-likelihood of any family, as the search needs it.

    Attributes
    ----------
    survey : what the nodes reported before the search
    shape : which terms vary
    order : the working order of terms
    free : (d,) which terms, in that order, have a global coefficient that is estimated
    parameters : the covariances as functions of a vector
    moments : (d, d) the mean over rows of ``x x'``
    rows : the number of rows of positive weight
    evaluations : the number of points evaluated so far
    progress : called by the search after each evaluation
    more : the number of global coefficients of columns that are not in ``X``
    """

    method: Method
    more = 0
    evaluations = 0
    progress: Progress | None = None
    mean_response = np.nan  # needed for counts only

    def __init__(self, survey: Survey, shape: Shape, moments: Floats, rows: float) -> None:
        self.survey, self.shape, self.moments, self.rows = survey, shape, moments, int(rows)
        self.network, self.tree, self.terms = survey.network, survey.network.tree, survey.network.terms
        rms = np.sqrt(np.diag(moments))
        self.parameters = Parameters.of(shape, 1.0 / np.where(rms > 0, rms, 1.0), self.tree.n_clusters)
        self.order = TermOrder(shape.order(len(self.terms)), self.parameters.client.width)
        self.free = shape.free(self.order.terms)

    @abstractmethod
    def evaluate(self, x: Floats) -> Evaluation:
        """The criterion at ``x``, its derivatives in the covariances, and the models there."""

    def value_and_gradient(self, x: Floats) -> tuple[float, Floats]:
        """Value and gradient at ``x``. The value is infinite if it cannot be computed."""
        try:
            here = self.evaluate(x)
        except (SolverError, np.linalg.LinAlgError):
            return np.inf, np.zeros_like(x)
        return here.value, self.gradient(x, here)

    def values_and_gradients(self, points: Sequence[Floats], *, independent: bool = False) -> list[tuple[float, Floats]]:
        """Values and gradients at several points. If they are ``independent``, no point gives the next its starting values."""
        results = []
        for x in points:
            if independent:
                self.forget()
            results.append(self.value_and_gradient(x))
        return results

    def gradient(self, x: Floats, here: Evaluation) -> Floats:
        """The gradient in ``x``, from the derivatives of an evaluation."""
        covariances = self.parameters.gradient(x, here.client_slope, here.cluster_slope)
        return np.concatenate([covariances, self.global_gradient(here.global_slope)])

    def covariances(self, x: Floats) -> tuple[Floats, Floats]:
        """The covariances of clients and of clusters, in the working order of terms."""
        S, T = self.parameters.covariances(x, len(self.terms))
        if not (np.isfinite(S).all() and np.isfinite(T).all()):
            raise SolverError("The likelihood cannot be computed: the covariances are not finite.")
        return S, T

    def names(self, terms: Ints) -> list[str]:
        """The names of terms, given their positions in the working order."""
        return [self.terms[at] for at in self.order.terms[terms]]

    def start(self, client: float, cluster: float) -> Floats:
        """A starting point where every term varies, with these standard deviations."""
        return self.parameters.even(client, cluster)

    def start_from(self, smaller: Criterion, x: Floats, level: str) -> Floats:
        """A starting point from an optimum ``x`` of the model without ``level``, with a little variation at that level."""
        little = getattr(self.parameters, level).even(0.1)
        rest = x[: smaller.parameters.n_parameters]
        return np.concatenate([little, rest] if level == "client" else [rest, little])

    @abstractmethod
    def log_dispersion(self, x: Floats, here: Evaluation) -> tuple[Floats, float]:
        """The gradient in ``x`` of the logarithm of the dispersion, and its variance if ``x`` is given."""

    @abstractmethod
    def finish_message(self, x: Floats, top: UpperPosterior) -> Message[NonFiniteClients]:
        """The message that makes nodes keep the results of the fit at ``x``."""

    # The defaults below are right for a linear model. It has no parameters of the global model, and no starting values.

    def global_gradient(self, centre: Floats) -> Floats:
        """The gradient in the parameters of the global model, from the one in ``wbar``."""
        return centre

    def global_step(self, x: Floats, here: Evaluation) -> Floats:
        """The parameters of the global model after a cheap step from ``x``."""
        return x[self.parameters.n_parameters :]

    def global_covariance(self, errors: Floats, top: UpperPosterior) -> Floats:
        """The posterior covariance of the global model. ``errors`` is the covariance of its parameters, if there are any."""
        return np.asarray(top.dispersion * invert(top.D.sum(axis=0), self.free)[0])

    def shared(self, dispersion: float) -> SharedCoefficients | None:
        """The coefficients of sparse columns, once the nodes have finished."""
        return None

    def forget(self) -> None:  # noqa: B027
        """Evaluate the next point without starting values from the last."""

    def may_have_other_optima(self, x: Floats) -> bool:
        """Whether there may be optima besides one at ``x``."""
        return True

    def is_doubtful(self, x: Floats) -> bool:
        """Whether an optimum at ``x`` is probably not the only one."""
        return False

    def largest_deviation(self, x: Floats) -> float:
        """The largest standard deviation of the margin that an entry of a factor of a covariance causes, if it matters."""
        return 0.0

    def change_to_client_fits(self, x: Floats) -> bool:
        """If digits were lost at ``x``, change to a computation that loses none. Returns whether it changed."""
        return False


# Messages, and the work of a node


@dataclass(frozen=True)
class IntegrateClients(Message["Integrated"], LearningState, label="integrate clients", phase="learn"):
    """Integrate the clients out, at each of ``m`` covariances ``S (m, 1 or k, d, d)`` of clients about their clusters.

    If the residual is tiny beside the varying terms, ``c_i - 1/2 b_i'S r_i`` loses all digits. It equals ``1/2 t_i'r_i`` plus
    half the sum of squares about the client's least-squares fit ``t_i``, which does not. ``about_client_fits`` asks for that.
    """

    S: Annotated[Floats, Axes("n 1|k d d", "covariance")]
    order: TermOrder
    about_client_fits: bool = False
    at_mode: bool = False  # integrate the quadratic losses that a fit by Laplace's approximation has kept

    @property
    def sizes(self) -> Sizes:
        return {"points": (len(self.S),), "groups": self.S.shape[1], "width": self.order.width}

    def at(self, node: Node) -> Integrated:
        node.keep(self)
        tree, parts = node.data.hierarchy, []
        for marginal in _integrated(node, self):
            seen = marginal.seen
            if self.about_client_fits and isinstance(marginal, Marginal):
                fits, squares = _client_fits(node, self.order)
                seen = replace(seen, c=tree.sum_up(0.5 * (squares + np.einsum("ia,ia->i", fits, marginal.r))))
            parts.append((seen.C, seen.r, seen.c, seen.n, marginal.log_determinants.sum()))
        C, r, c, n, volume = (np.stack(part) for part in zip(*parts, strict=True))
        return Integrated(Quadratic(C, r, c, n), volume)


@dataclass(frozen=True)
class Integrated(Reply):
    """By point: sums over a node's clients of their losses as functions of ``w_j``, and of log-determinants (``volume``)."""

    seen: Quadratic
    volume: Annotated[Floats, Axes("points")]


@dataclass(frozen=True)
class LikelihoodSlope(Message[Slopes], label="slope of the likelihood", phase="learn"):
    """Sum the gradient in ``S_j``, given the clusters' means ``w (m, k, d)`` and covariances ``P (m, k, d, d)``.

    The points are those of the last :class:`IntegrateClients`.
    """

    w: Annotated[Floats, Axes("n k order")]
    P: Annotated[Floats, Axes("n k order order")]

    @property
    def sizes(self) -> Sizes:
        return {"points": (len(self.w),)}

    def at(self, node: Node) -> Slopes:
        asked = node.state(IntegrateClients)
        width, ptr = asked.order.width, node.data.hierarchy.cluster_ptr
        points = zip(_integrated(node, asked), self.w, self.P, strict=True)
        sums = [marginal.sensitivity(width, ptr, w, P) for marginal, w, P in points]
        bend, pull = (np.stack(part) for part in zip(*sums, strict=True))
        if asked.S.shape[1] == 1:  # one covariance for all clusters, so only the sum over clusters is needed
            bend, pull = bend.sum(axis=1, keepdims=True), pull.sum(axis=1, keepdims=True)
        return Slopes(bend, pull)


@dataclass(frozen=True)
class FinishLinear(Message[NonFiniteClients], label="finish linear", phase="learn"):
    """Compute and keep the clients' models, given their covariance ``S (1 or k, d, d)`` and the clusters' ``w (k, d)``."""

    S: Annotated[Floats, Axes("1|k d d", "covariance")]
    order: TermOrder
    w: Annotated[Floats, Axes("k d")]

    def at(self, node: Node) -> NonFiniteClients:
        (H, b, _), origin = _losses(node, self.order), working_columns(node).origin
        theta, _ = H.descend(b, client_spread(node, self.S, self.order), node.data.hierarchy.parent, self.w)
        return keep_results(node, origin + theta[:, self.order.inverse], client_losses(node), origin)


def _integrated(node: Node, asked: IntegrateClients) -> tuple[ClientMarginal, ...]:
    """Each client's part of the likelihood, at each point; points with the same covariance of clients share it."""
    now, order = working_columns(node), asked.order

    def compute() -> tuple[ClientMarginal, ...]:
        marginalise = _marginaliser(node, asked)
        keys = [S.tobytes() for S in asked.S]
        most = keys.index(Counter(keys).most_common(1)[0][0])
        base, found = asked.S[most], dict[bytes, ClientMarginal]()
        for key, S in zip([keys[most], *keys], [base, *asked.S], strict=True):
            if key not in found:
                near, ptr = found.get(keys[most]), node.data.hierarchy.cluster_ptr
                other = near.changed(base[0], S[0], ptr) if isinstance(near, StackedMarginal) and len(S) == 1 else None
                found[key] = other or marginalise(S)
        return tuple(found[key] for key in keys)

    flags = np.array([asked.about_client_fits, asked.at_mode])
    return from_cache(node, "integrated", (asked.S, *order.key, now.basis, now.origin, flags), compute)


def _marginaliser(node: Node, asked: IntegrateClients) -> Callable[[Floats], ClientMarginal]:
    """The function that eliminates the node's clients, given their covariances ``S (1 or k, d, d)``."""
    now, order, ptr = working_columns(node), asked.order, node.data.hierarchy.cluster_ptr
    if asked.about_client_fits or space_of(len(order.terms), order.width) == "rows":
        H, b, aside = _losses(node, order, whole=asked.about_client_fits, at_mode=asked.at_mode)
        return lambda S: H.marginalise(b, client_spread(node, S, order), ptr, aside)

    def factors() -> Factors:
        H, b, aside = _losses(node, order, at_mode=asked.at_mode)
        return Factors.of(H.leading(order.width), H.by_cell(ptr), given(b), aside, ptr)

    kept = (node.state(ClientSums).units.C,) if asked.at_mode else ()
    name = "factors at the mode" if asked.at_mode else "factors"
    return from_cache(node, name, (now.basis, now.origin, *order.key, *kept), factors).marginalise


def _losses(
    node: Node, order: TermOrder, *, whole: bool = False, at_mode: bool = False
) -> tuple[Hessians, Floats | None, tuple[Floats, Floats]]:
    """The clients' losses about the origin in the working order: Hessians, linear terms, constants and numbers of rows."""
    if whole or at_mode or space_of(len(order.terms), order.width) == "terms":
        losses = client_losses(node, order.terms, at_mode=at_mode)
        return WholeHessians(losses.C), losses.r, (losses.c, losses.n)
    return losses_in_space(node, order)


def _client_fits(node: Node, order: TermOrder) -> tuple[Floats, Floats]:
    """Each client's least-squares fit, relative to the origin, and the sum of squares about it."""
    columns = working_columns(node)

    def compute() -> tuple[Floats, Floats]:
        losses = client_losses(node)
        fits = solve_symmetric(losses.C, losses.r)
        squares = 2 * node.loss.value(client_rows(node), columns.origin + fits)
        return np.ascontiguousarray(fits[:, order.terms]), squares

    return from_cache(node, "client fits", (columns.basis, columns.origin, order.terms), compute)


# The coordinator


class LinearCriterion(Criterion):
    """REML or ML of a linear model, from its clients' sums."""

    def __init__(self, survey: Survey, shape: Shape, *, reml: bool) -> None:
        sums, rows = survey.cluster_sums, float(survey.cluster_sums.n.sum())
        super().__init__(survey, shape, sums.C.sum(axis=0) / max(rows, 1.0), rows)
        self.reml, self.method, self.about_client_fits, self.at_mode = reml, "REML" if reml else "ML", False, False
        self._recent: list[tuple[bytes, Evaluation]] = []  # the best point and the last, which the search evaluates again

    def evaluate(self, x: Floats) -> Evaluation:
        known = [here for at, here in self._recent if at == x.tobytes()]
        return known[0] if known else self._evaluate([x])[0]

    def values_and_gradients(self, points: Sequence[Floats], *, independent: bool = False) -> list[tuple[float, Floats]]:
        """All points take as many exchanges as one, if the criterion can be computed at all of them."""
        size = max(1, AT_ONCE // self.numbers_kept)
        results: list[tuple[float, Floats]] = []
        for first in range(0, len(points), size):
            part = points[first : first + size]
            try:
                here = self._evaluate(part) if len(part) > 1 else []
            except (SolverError, np.linalg.LinAlgError):
                here = []
            together = [(at.value, self.gradient(x, at)) for x, at in zip(part, here, strict=False)]
            results += together or super().values_and_gradients(part)
        return results

    @property
    def numbers_kept(self) -> int:
        """How many numbers the nodes keep of their clients for each point."""
        d, whole = len(self.terms), space_of(len(self.terms), self.order.width) == "terms"
        return self.tree.n_clients * (d if whole else max(self.order.width, 1)) * (d + 1)

    def _evaluate(self, points: Sequence[Floats]) -> list[Evaluation]:
        self.evaluations += len(points)
        results = self.at_covariances([self.covariances(x) for x in points])
        recent = [*self._recent, *((x.tobytes(), here) for x, here in zip(points, results, strict=True))]
        self._recent = [min(recent, key=lambda entry: entry[1].value), recent[-1]]
        return results

    def at_covariances(self, points: Sequence[tuple[Floats, Floats]]) -> list[Evaluation]:
        """Evaluate covariances, ``(1 or k, d, d)`` of clients and ``(1, d, d)`` of clusters. All points take two exchanges."""
        tops = self.upper_levels(points)
        slopes = self.network.ask(LikelihoodSlope(np.stack([top.w for top in tops]), np.stack([top.P for top in tops])))
        width, parts = self.parameters.cluster.width, zip(tops, slopes.bend, slopes.pull, strict=True)
        return [_evaluation(top, bend, pull, width) for top, bend, pull in parts]

    def upper_levels(self, points: Sequence[tuple[Floats, Floats]]) -> list[UpperPosterior]:
        """The upper levels at covariances. All points take one exchange."""
        S = np.stack([S for S, _ in points])
        sums = self.network.ask(IntegrateClients(S, self.order, self.about_client_fits, self.at_mode))
        seen = map(Quadratic, sums.seen.C, sums.seen.r, sums.seen.c, sums.seen.n)
        parts = zip(seen, sums.volume - self.survey.log_weights, points, strict=True)
        return [upper(clusters, float(volume), S[0], self.reml, self.free, self.more) for clusters, volume, (_, S) in parts]

    def log_dispersion(self, x: Floats, here: Evaluation) -> tuple[Floats, float]:
        return self.parameters.gradient(x, *(-pull / here.top.dof for pull in here.pull)), 0.0

    def finish_message(self, x: Floats, top: UpperPosterior) -> FinishLinear:
        return FinishLinear(self.covariances(x)[0], self.order, top.w)

    def change_to_client_fits(self, x: Floats) -> bool:
        """Use sums of squares about clients' fits if the residual is tiny beside those about the pooled fit."""
        top = self.evaluate(x).top
        lost = top.dispersion * top.dof < _LOST_DIGITS * 2 * float(self.survey.cluster_sums.c.sum())
        if lost:
            self.about_client_fits, self._recent = True, []
        return bool(lost)


def _evaluation(top: UpperPosterior, bend: Floats, pull: Floats, width: int) -> Evaluation:
    """Only the first ``width`` terms may vary between clusters."""
    D, cluster_bend = top.D[:, :width], np.zeros((1, *top.P0.shape))
    cluster_bend[0, :width, :width] = (D[:, :, :width] - D @ (top.P0 @ D.swapaxes(1, 2))).sum(axis=0)
    cluster_pull = (top.force.T @ top.force)[None]
    pull, cluster_pull = pull / top.dispersion, cluster_pull / top.dispersion
    return Evaluation(top.criterion, bend - pull, cluster_bend - cluster_pull, np.empty(0), (pull, cluster_pull), top)
