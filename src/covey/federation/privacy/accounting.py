"""What differential privacy costs and covers: the epsilon of a run, and the noise for an epsilon.

Every release of :mod:`.sweeps` is a Gaussian mechanism of sensitivity ``clip`` and standard deviation ``noise *
clip``. Releases of multipliers ``z_1, z_2, ...``, each chosen in the knowledge of those before, tell no more of a client than
one with ``1/z^2 = sum 1/z_t^2``, and its epsilon for a ``delta`` is exact (Balle and Wang 2018, as dp-accounting has it).

What epsilon covers: all rows of one client. What anybody can learn from all that leaves the nodes hardly depends on whether a
client's rows are there or not: by a factor ``exp(epsilon)`` at most, but for a probability ``delta``. It holds against the
coordinator, which sees each node's noisy sums, against the other sites, and against whoever gets the model; every node adds
all the noise by itself, so that nothing rests on other nodes' honesty, also under secure aggregation.

What it does not cover, since it is sent as it is: that a client takes part, in which cluster and at which site (as a number
of clients, and as tags of ids); what columns there are. The operator lists categories and classes, since those that occur
reveal something of rows; sums of columns, numbers of rows, values and gradients are not sent. A client's own model stays at
its node, and has no noise of its own: it is for those who may see its rows. Several runs on the same rows add up; a site's
``privacy.json`` keeps count (:mod:`covey.federation.site.policy`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from covey.errors import SolverError, number
from covey.federation.privacy.sweeps import cluster_gammas, private_across
from covey.federation.wire.messages import Privacy
from covey.losses import FAMILIES
from covey.model.model import Fitted
from covey.nodes.network import Network, SetGamma
from covey.objective.objective import Penalty
from covey.problem.problem import Spec
from covey.solvers.registry import first_order

DELTA = 1e-6
CLIP = 1.0
_UP = 1 + 1e-9  # noise for an epsilon is rounded up, so that the epsilon of that noise is not above it


# The accountant


def spent(releases: Iterable[tuple[float, int]], delta: float = DELTA) -> float:
    """The epsilon of releases, given as pairs of their noise and their number.

    >>> round(spent([(5.0, 1)], delta=1e-5), 3), round(spent([(5.0, 4)], delta=1e-5), 3)
    (0.726, 1.555)
    """
    gaussian = _accounting(delta).get_epsilon_gaussian
    made = [(noise, count) for noise, count in releases if count]
    if any(noise <= 0 for noise, _ in made):
        return math.inf
    precision = sum(count / noise**2 for noise, count in made)
    return float(gaussian(1 / math.sqrt(precision), delta)) if precision else 0.0


def noise_for(target: float, releases: int, delta: float = DELTA) -> float:
    """The least noise with which some releases cost at most an epsilon.

    >>> round(noise_for(1.0, releases=1, delta=1e-5), 2), round(noise_for(1.0, releases=4, delta=1e-5), 2)
    (3.73, 7.46)
    """
    sigma = _accounting(delta).get_sigma_gaussian
    return float(sigma(number("epsilon", target, above=0), delta)) * math.sqrt(releases) * _UP


def _accounting(delta: float) -> Any:
    """The package with the formulas, for a delta that they are valid for."""
    if number("delta", delta, above=0) >= 1:
        raise SolverError(f"The 'delta' parameter must be a number < 1. Got {delta!r} instead.")
    try:
        import dp_accounting
    except ImportError:
        raise SolverError("epsilon needs the package 'dp-accounting'; install it with: pip install 'covey[flower]'.") from None
    return dp_accounting


# The operator


def privacy_of(settings: Mapping[str, Any], family: str) -> tuple[Privacy | None, float]:
    """What an operator's settings ask for, ``epsilon`` and, if they say so, ``delta``, ``clip`` and ``rounds``; and delta."""
    given = {name: settings[name] for name in ("epsilon", "delta", "clip", "rounds") if settings.get(name) not in (None, "")}
    delta = given.get("delta", DELTA)
    if "epsilon" not in given:
        if given:
            raise SolverError(f"The setting {next(iter(given))!r} belongs to differential privacy; give epsilon too.")
        return None, delta
    rounds = given.get("rounds", FAMILIES[family].private_rounds if family in FAMILIES else 1)
    asked = Privacy(1.0, given.get("clip", CLIP), rounds)  # refuses rounds and clip out of range
    return replace(asked, noise=noise_for(given["epsilon"], rounds, delta)), delta


def check_spec(spec: Spec) -> None:
    """Refuse what cannot be fitted privately: penalties that are learned, and solvers that send more."""
    if spec.learns is not None:
        raise SolverError("Differential privacy needs given penalties, since learning them sends more; give gamma and lam.")
    other = f"baseline={spec.baseline!r}" if spec.baseline is not None else f"solver={spec.solver!r}"
    if spec.baseline is not None or spec.solver in first_order():
        raise SolverError(f"Differential privacy goes with solver 'auto', 'sweep' or 'newton'; leave out {other}.")
    if spec.standardize:
        raise SolverError("Differential privacy does not go with standardize=True, whose sums have no noise; scale columns.")
    if spec.james_stein:
        raise SolverError("Differential privacy does not go with james_stein=True, whose noise it does not know; leave it out.")


def check_delta(delta: float, clients: int) -> None:
    """Refuse a delta that would allow a client's rows to be published as they are."""
    if delta * clients >= 1:
        raise SolverError(
            f"A delta of {delta:g} allows the rows of one of {clients} clients to be shown; give one below 1/{clients}."
        )


def fit_privately(network: Network, spec: Spec, privacy: Privacy) -> Fitted:
    """Private sweeps with the specification's penalties."""
    penalty = Penalty.of(network.tree, gamma=1.0 if spec.gamma is None else spec.gamma, lam=spec.lam, alpha=spec.alpha)
    network.ask(SetGamma(cluster_gammas(network, penalty)))
    return Fitted(private_across(network, penalty, privacy), penalty)


def statement(privacy: Privacy, delta: float, starts: int = 1) -> dict[str, Any]:
    """What a fit promises; ``starts`` is how often it began, since each start may have released all its rounds."""
    releases = starts * privacy.rounds
    cost = spent([(privacy.noise, releases)], delta)
    return {"epsilon": cost, "delta": delta, "clip": privacy.clip, "noise": privacy.noise, "releases": releases}


def promised(fitted: Fitted, stated: Mapping[str, Any]) -> Fitted:
    """A fit whose account says what it promises, wherever it is printed."""
    many = f"{stated['releases']} release{'' if stated['releases'] == 1 else 's'}"
    words = (
        f"differential privacy: (epsilon, delta) = ({stated['epsilon']:.4g}, {stated['delta']:.4g}) for every client, "
        f"clip {stated['clip']:.4g}, noise {stated['noise']:.4g}, {many}"
    )
    end = fitted.fit.convergence
    return replace(fitted, fit=replace(fitted.fit, convergence=replace(end, message=f"{end.message}; {words}")))
