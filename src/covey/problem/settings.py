"""The settings of a fit, each declared once: its default, its type on a command line and a line of help.

The estimators' parameters, the options of the commands and the JSON in models and messages are made of these declarations.
This module imports nothing numerical, so that ``covey --help`` need not wait.
"""

# ruff: noqa: RUF009 - setting() makes a field
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

Penalties = Literal["auto", "reml", "ml", "cv"]
PENALTIES = ("auto", "reml", "ml", "cv")
BASELINES = ("single-model", "locally-trained", "single-cluster")
KINDS = ("isotropic", "diagonal", "full")
COLUMNS = ("client", "cluster", "weights", "offset")  # settings that name a column


def setting(default: Any, help: str = "", shell: Any = None) -> Any:
    """A field of :class:`Settings`: its default, its help on a command line, and its type there (None: no option).

    ``{choices}`` and ``{first_order}`` in the help stand for the names of all solvers, and of the randomised algorithms.
    """
    return field(default=default, metadata={"help": help, "shell": shell})


@dataclass(frozen=True)
class Settings:
    """What a user may say about a fit; see :class:`covey.problem.spec.Spec`, and the estimators for what each means."""

    family: str = setting("gaussian", "gaussian, bernoulli (two classes), poisson (counts) or gamma (positive).", str)
    client: str | None = setting(None, "Column with the clients' ids, unless the formula names it.", str | None)
    cluster: str | None = setting(None, "Column with the clusters' ids.", str | None)
    weights: str | None = setting(None, "Column with row weights.", str | None)
    offset: str | None = setting(None, "Column with a known part of the linear predictor.", str | None)
    formula: str | None = setting(None, "Response and terms: 'y ~ log(x) + zone', 'y ~ x + (x | cluster/client)'.", str)
    fit_intercept: bool = setting(True)
    standardize: bool = setting(False, "Put terms about their mean, in units of their standard deviation.", bool)
    gamma: Any = setting(None, "Pull of clients to their cluster, if not to be learned.", float | None)
    lam: Any = setting(None, "Pull of clusters to the global model (1 with --gamma).", float | None)
    alpha: Any = setting(None, "In place of --lam: 0 independent clusters, 1 one cluster.", float | None)
    penalty: Penalties = setting("auto", "How to learn penalties: reml, ml or cv.", str)
    vary: Any = setting(None, "A term that varies; all by default. Repeat it.", list[str] | None)
    covariance: Any = setting(None, "isotropic, diagonal or full; diagonal by default.", str | None)
    per_cluster: bool = setting(False, "Learn each cluster's own spread of clients.", bool)
    tests: bool = setting(True, "Test whether clients differ and clusters matter.", bool)
    nested: bool | None = setting(None)
    reduction: Literal["sum", "mean"] = setting("sum", "'sum' or 'mean' of the loss over a client's rows.", str)
    ridge: float = setting(0.0, "Pull of every client's coefficients to zero.", float)
    james_stein: bool = setting(False, "Shrink the global model towards zero by its uncertainty (more than two terms).", bool)
    baseline: str | None = setting(None, "single-model, locally-trained or single-cluster.", str | None)
    solver: str = setting("auto", "One of {choices}.", str)
    options: Mapping[str, Any] | None = setting(None, "Of {first_order}, as name=value: p0=0.1.", list[str] | None)
    tol: float = setting(1e-8, "Gradient norm at which Newton stops; certified gap for these.", float)
    max_iter: int | None = setting(None, "Most iterations.", int | None)
    seed: int = setting(0, "Seed of random choices.", int)


def declared() -> dict[str, Any]:
    """The declaration of each setting, by its name: a field with ``default`` and ``metadata``."""
    return {part.name: part for part in fields(Settings)}
