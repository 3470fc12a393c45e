"""The criterion that the search minimises: a likelihood as a function of one vector of parameters, with its gradient.

The likelihoods themselves, and what nodes are asked for them, are in :mod:`.linear_likelihood` and
:mod:`.laplace_likelihood`; the value here is twice their negative logarithm.

A vector begins with the parameters of the clients' and the clusters' covariances (:class:`.Parameters`). A linear model needs
no others: its global model and its residual variance are profiled out, as in lme4 (Bates et al. 2015). For counts and
classes the global model ``wbar`` follows, as in glmer with nAGQ = 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from covey._typing import Floats, Ints
from covey.errors import SolverError
from covey.variance.columns import TermOrder
from covey.variance.components import Parameters, Shape
from covey.variance.identify import Survey
from covey.variance.laplace_likelihood import LaplaceLikelihood
from covey.variance.linear_likelihood import Evaluation, GaussianLikelihood, invert

_LOST_DIGITS = 1e-7  # share of the sum of squares about the pooled fit
_LARGE = 3.0  # standard deviation of log-odds or log-means
_AT_ONCE = 1 << 24  # numbers that nodes keep of their clients for points that are evaluated together
START = 0.5  # standard deviation of everything that varies, in units of the residual's


class Criterion(ABC):
    """What the search needs of a likelihood, for any family.

    Attributes
    ----------
    known : what was asked of the nodes before
    shape : which terms vary
    order : the working order of terms
    parameters : how a vector gives the covariances
    evaluations : how many points were evaluated
    """

    evaluations = 0

    def __init__(self, known: Survey, shape: Shape, mean_squares: Floats) -> None:
        self.known, self.shape = known, shape
        self.network, self.tree, self.terms = known.network, known.network.tree, known.network.terms
        rms = np.sqrt(mean_squares)
        self.parameters = Parameters.of(shape, 1.0 / np.where(rms > 0, rms, 1.0), self.tree.n_clusters)
        self.order = TermOrder(shape.order(len(self.terms)), self.parameters.client.width)

    @abstractmethod
    def evaluate(self, x: Floats) -> Evaluation:
        """The criterion at ``x``, its derivatives in the covariances, and the models there."""

    def value_and_gradient(self, x: Floats) -> tuple[float, Floats]:
        """For the search: infinite where the criterion cannot be computed."""
        try:
            here = self.evaluate(x)
        except (SolverError, np.linalg.LinAlgError):
            return np.inf, np.zeros_like(x)
        return here.value, self.gradient(x, here)

    def values_and_gradients(self, points: Sequence[Floats], *, independent: bool = False) -> list[tuple[float, Floats]]:
        """The same at several points. If they are ``independent``, none is a starting value for the next."""
        results = []
        for x in points:
            if independent:
                self.forget()
            results.append(self.value_and_gradient(x))
        return results

    def gradient(self, x: Floats, here: Evaluation) -> Floats:
        """The derivatives of an evaluation as one gradient in ``x``."""
        return np.concatenate([self.parameters.gradient(x, here.client, here.cluster), self.global_gradient(here.centre)])

    def covariances(self, x: Floats) -> tuple[Floats, Floats]:
        """Of clients and clusters, in the working order of terms."""
        S, T = self.parameters.covariances(x, len(self.terms))
        if not (np.isfinite(S).all() and np.isfinite(T).all()):
            raise SolverError("There is no likelihood at covariances that are not finite.")
        return S, T

    def names(self, terms: Ints) -> list[str]:
        """The names of terms that are given by their positions in the working order."""
        return [self.terms[at] for at in self.order.terms[terms]]

    def start(self, client: float, cluster: float) -> Floats:
        """A starting point where every term varies, with these standard deviations."""
        return self.parameters.even(client, cluster)

    def start_from(self, smaller: Criterion, x: Floats, level: str) -> Floats:
        """A starting point from an optimum ``x`` of the model without ``level``, with a little variation at that level."""
        little = getattr(self.parameters, level).even(0.1)
        rest = x[: smaller.parameters.n_parameters]
        return np.concatenate([little, rest] if level == "client" else [rest, little])

    # A linear model has no parameters of the global model, and one optimum for all purposes.

    def global_gradient(self, centre: Floats) -> Floats:
        """The gradient in the parameters of the global model, from that in ``wbar``."""
        return centre

    def global_step(self, x: Floats, here: Evaluation) -> Floats:
        """The parameters of the global model after a cheap step from ``x``."""
        return x[self.parameters.n_parameters :]

    @abstractmethod
    def forget(self) -> None:
        """Evaluate the next point without starting values from the last."""

    def may_have_other_optima(self, x: Floats) -> bool:
        """Whether there may be optima besides one at ``x``."""
        return True

    def is_doubtful(self, x: Floats) -> bool:
        """Whether an optimum at ``x`` is probably not the only one."""
        return False


class LinearCriterion(Criterion):
    """REML or ML of a linear model, from its clients' sums."""

    def __init__(self, known: Survey, shape: Shape, *, reml: bool) -> None:
        self.rows = float(known.cluster_sums.n.sum())
        self.gram = known.cluster_sums.C.sum(axis=0)
        super().__init__(known, shape, np.diag(self.gram) / max(self.rows, 1.0))
        self.likelihood = GaussianLikelihood(self.network, self.order, reml, known.log_weights)
        self._recent: list[tuple[bytes, Evaluation]] = []  # the best point and the last, to which the search comes back

    def evaluate(self, x: Floats) -> Evaluation:
        for at, here in self._recent:
            if at == x.tobytes():
                return here
        return self._evaluate([x])[0]

    def values_and_gradients(self, points: Sequence[Floats], *, independent: bool = False) -> list[tuple[float, Floats]]:
        """In as many exchanges as one point takes, if the criterion can be computed at all of them."""
        n, d = self.tree.n_clients, len(self.terms)
        size = max(1, _AT_ONCE // (n * d * (d + 1)))
        results: list[tuple[float, Floats]] = []
        for first in range(0, len(points), size):
            part = points[first : first + size]
            try:
                results += [(here.value, self.gradient(x, here)) for x, here in zip(part, self._evaluate(part), strict=True)]
            except (SolverError, np.linalg.LinAlgError):
                results += super().values_and_gradients(part)
        return results

    def _evaluate(self, points: Sequence[Floats]) -> list[Evaluation]:
        self.evaluations += len(points)
        results = self.likelihood.many([self.covariances(x) for x in points])
        recent = [*self._recent, *((x.tobytes(), here) for x, here in zip(points, results, strict=True))]
        self._recent = [min(recent, key=lambda each: each[1].value), recent[-1]]
        return results

    def forget(self) -> None:
        """Nothing to forget: an evaluation has no starting values."""

    def has_lost_digits(self, x: Floats) -> bool:
        """Whether the residual at ``x`` is so small that sums of squares about the pooled fit have lost its digits."""
        top = self.evaluate(x).top
        return bool(top.dispersion * top.dof < _LOST_DIGITS * 2 * float(self.known.cluster_sums.c.sum()))

    def use_client_fits(self) -> None:
        """From now on compute sums of squares about each client's own fit, which loses no digits."""
        self.likelihood, self._recent = replace(self.likelihood, about_client_fits=True), []


class LaplaceCriterion(Criterion):
    """The Laplace approximation for counts and classes, from the rows.

    The global model is ``wbar = middle + half z``: ``z`` are its parameters, in units of its uncertainty, so that one step
    length suits it and the covariances.
    """

    def __init__(self, known: Survey, shape: Shape) -> None:
        totals = known.totals
        if totals is None:
            raise SolverError("A model of counts or classes needs the rows that it is to be fitted to.")
        self.moments = totals.gram / totals.weight
        self.mean_response = totals.response / totals.rows
        super().__init__(known, shape, np.diag(self.moments))
        self.rows, self.constant = int(totals.counted), 2 * totals.constant
        tol = 1e-9 + 1e-10 * float(np.sqrt(totals.rows))
        width, weight = self.parameters.cluster.width, totals.weight
        self.likelihood = LaplaceLikelihood(self.network, self.order, width, tol, weight, totals.perfect)
        self.scale = 1.0  # the standard deviation that covariances are relative to, at the last point
        self.middle, self.half = known.middle[self.order.terms], np.eye(len(self.terms))
        begin = self.evaluate(self.start(START, START)).top
        values, vectors = np.linalg.eigh(invert(begin.D.sum(axis=0))[0])
        self.half = vectors * (np.sqrt(np.maximum(values, 0.0)) * self.scale)

    def evaluate(self, x: Floats) -> Evaluation:
        self.evaluations += 1
        with np.errstate(over="ignore", invalid="ignore"):
            here = self.likelihood(*self.covariances(x), self.wbar(x))
        self.scale = float(np.sqrt(here.top.dispersion))
        return replace(here, value=here.value + self.constant)

    def wbar(self, x: Floats) -> Floats:
        """The global model, in the working order of terms."""
        return np.asarray(self.middle + self.half @ x[self.parameters.n_parameters :])

    def start(self, client: float, cluster: float) -> Floats:
        self.forget()
        return np.concatenate([super().start(client, cluster), np.zeros(len(self.terms))])

    def start_from(self, smaller: Criterion, x: Floats, level: str) -> Floats:
        self.forget()
        wbar = self.middle
        if isinstance(smaller, LaplaceCriterion):
            wbar = smaller.wbar(x)[smaller.order.inverse][self.order.terms]
        return np.concatenate([super().start_from(smaller, x, level), np.linalg.solve(self.half, wbar - self.middle)])

    def global_gradient(self, centre: Floats) -> Floats:
        return np.asarray(centre @ self.half)

    def global_step(self, x: Floats, here: Evaluation) -> Floats:
        """A Newton step, without the part of the determinants."""
        covariance, _ = invert(here.top.D.sum(axis=0))
        return np.asarray(np.linalg.solve(self.half, self.wbar(x) + covariance @ here.top.force.sum(axis=0) - self.middle))

    def forget(self) -> None:
        self.likelihood.forget()

    def may_have_other_optima(self, x: Floats) -> bool:
        """Clients with many rows for each of their coefficients give the Laplace approximation the shape of a Gaussian's."""
        return self.is_doubtful(x) or self.rows < 5 * self.tree.n_clients * max(self.parameters.client.q, 1)

    def is_doubtful(self, x: Floats) -> bool:
        """With standard deviations so large that most clients' classes are all but certain, several optima are common."""
        return any(
            (self.scale * np.abs(variation.factors(part)) / variation.size[:, None] > _LARGE).any()
            for variation, part in self.parameters.split(x)
            if variation.q
        )


def criterion_for(known: Survey, shape: Shape, *, reml: bool) -> Criterion:
    """The criterion of a surveyed network, with these levels and terms varying."""
    return LinearCriterion(known, shape, reml=reml) if known.network.loss.reml else LaplaceCriterion(known, shape)
