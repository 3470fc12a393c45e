"""Record the numbers of small fits of every kind, to the last bit, to compare two versions of covey.

    python tests/golden/recorder.py --out record.json        # all fits of the covey that Python imports
    python tests/golden/recorder.py --only "sites:"          # those whose name contains this, to the screen

The file runs on any version since commit 681de36. It uses public names; the few internal names are looked up in
``internals``, the one place to edit when they move. Bytes on a network are not recorded.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

import covey
from covey import HierarchicalClassifier, HierarchicalPoissonRegressor, HierarchicalRegressor, datasets

Numbers = dict[str, Any]
"""Quantities of one fit by name: a text, a whole number, a truth value, or a list of numbers."""

FITS: dict[str, Callable[[], Numbers]] = {}
ESTIMATORS = {
    "gaussian": HierarchicalRegressor,
    "bernoulli": HierarchicalClassifier,
    "poisson": HierarchicalPoissonRegressor,
}

_PLACES = {
    "Spec": ("covey.spec.Spec", "covey.problem.problem.Spec"),
    "Terms": ("covey.federation.coordinator.Terms", "covey.federation.operator.settings.RunSettings"),
    "Privacy": (
        "covey.solvers.private.Privacy",
        "covey.federation.wire.agreement.Privacy",
        "covey.federation.wire.messages.Privacy",
    ),
    "simulate": ("covey.federation.simulate.simulate", "covey.federation.simulate.simulate_sites"),
}
"""By the name it had at first, the places of each thing from within covey, the oldest first."""


def internals(name: str) -> Any:
    """A class or function from within covey, wherever it is now and whatever it is called."""
    for place in _PLACES[name]:
        module, _, own = place.rpartition(".")
        try:
            return getattr(import_module(module), own)
        except (ModuleNotFoundError, AttributeError):
            continue
    raise ImportError(f"{name} is at none of {', '.join(_PLACES[name])}; say in _PLACES where it is.")


# How numbers are kept

_WHOLE = 48  # numbers of an array that are all kept
_SOME = 4  # rows of a larger one


def kept(name: str, values: Any) -> Numbers:
    """An array as numbers; of a large one some rows, the sums of its columns, and a digest of all its bits."""
    array = np.ascontiguousarray(values, dtype=np.float64)
    if array.size <= _WHOLE:
        return {name: _exact(array)}
    rows = array.reshape(len(array), -1)
    some = np.unique(np.linspace(0, len(rows) - 1, _SOME).astype(int))
    return {
        f"{name} shape": list(array.shape),
        f"{name} rows": _exact(rows[some]),
        f"{name} sums": [_plain(_sum(column)) for column in rows.T],
        f"{name} sums of squares": [_plain(_sum(column * column)) for column in rows.T],
        f"{name} digest": hashlib.sha256(array.tobytes()).hexdigest()[:16],
    }


def _sum(values: Any) -> float:
    return math.fsum(values) if np.isfinite(values).all() else float(np.sum(values))


def _exact(array: Any) -> list[float | str]:
    return [_plain(value) for value in np.ravel(array).tolist()]


def _plain(value: float) -> float | str:
    """As JSON has it: its digits give the same bits back; what is no number is a word."""
    return float(value) if math.isfinite(value) else repr(float(value))


# What is read off a fitted estimator

_COUNTED = ("iteration", "exchanges", "exchanges_between")
_MEASURED = ("objective", "gap", "certified_gap", "gradient_norm")


def numbers_of(model: Any, rows: Any = None, **ids: Any) -> Numbers:
    """All that is recorded of an estimator; ``rows`` are some to predict, with ids that may be unseen."""
    found = coefficients(model) | convergence(model.convergence_) | account(model.history_, model.ledger_)
    if rows is not None:
        found |= predictions(model, rows, **ids)
    if learns(model):
        found |= components(model.components_) | intervals(model, rows, **ids)
    return found


def coefficients(model: Any) -> Numbers:
    return kept("client", model.coef_) | kept("cluster", model.cluster_coef_) | kept("global", model.global_coef_)


def convergence(end: Any) -> Numbers:
    return {
        "solver": end.solver,
        "converged": bool(end.converged),
        "iterations": int(end.iterations),
        "exchanges": int(end.exchanges),
        "objective": [_plain(end.objective)],
        "gradient_norm": [_plain(end.gradient_norm)],
        "gap": [] if end.gap is None else [_plain(end.gap)],
    }


def account(history: Any, ledger: Any) -> Numbers:
    """What an iterative solver says of its way, and of the exchanges it took; not their bytes."""
    found: Numbers = {}
    if history is not None:
        for name in (*_COUNTED, *_MEASURED):
            column = history[name].to_numpy() if hasattr(history[name], "to_numpy") else history[name]
            values = np.array([np.nan if value is None else value for value in np.asarray(column, dtype=object)], dtype=float)
            found |= kept(f"history {name}", values)
    if ledger is not None:
        counts = {name: getattr(ledger, name) for name in ("within", "between", "checks", "paper_within", "paper_between")}
        for name, values in counts.items():
            found |= kept(f"ledger {name}", np.atleast_1d(values))
    return found


def learns(model: Any) -> bool:
    try:
        return model.components_ is not None
    except covey.CoveyError:
        return False


def components(learned: Any) -> Numbers:
    found: Numbers = {
        "method": learned.method,
        "parameters": int(learned.parameters),
        "rows": int(learned.rows),
        "log_likelihood": [_plain(learned.log_likelihood)],
        "residual": [] if learned.residual is None else [_plain(learned.residual)],
        "shares": _exact(learned.shares),
    }
    for level in ("client", "cluster"):
        own = getattr(learned, level)
        found |= (
            kept(f"{level} covariance", own.covariance) | kept(f"{level} sd", own.sd) | kept(f"{level} sd_error", own.sd_error)
        )
    for test in learned.tests:
        name = f"{test.level} test"
        found |= {f"{name} parameters": int(test.parameters)}
        found |= {f"{name} statistic": [_plain(test.statistic)], f"{name} p_value": [_plain(test.p_value)]}
    return found


def predictions(model: Any, rows: Any, **ids: Any) -> Numbers:
    predict, found = model.predict_proba if hasattr(model, "predict_proba") else model.predict, {}
    for level in ("client", "cluster", "global"):
        found |= kept(f"predict {level}", predict(rows, level=level, **ids, **_effect_zero(predict)))
    return found


def _effect_zero(method: Any) -> dict[str, bool]:
    """Predict at a random effect of zero for unseen groups, as all versions can."""
    return {"expected": False} if "expected" in signature(method).parameters else {}


def intervals(model: Any, rows: Any = None, **ids: Any) -> Numbers:
    found: Numbers = {}
    ids |= _effect_zero(model.predict_interval)
    for level in ("client", "cluster", "global"):
        frame = model.coef_frame(level)
        columns = [name for name in ("std_error", "lower", "upper") if name in frame.columns]
        if columns:
            found |= kept(f"coef_frame {level}", np.column_stack([np.asarray(frame[name]) for name in columns]))
    if rows is not None:
        found |= kept("interval", model.predict_interval(rows, **ids))
        found |= kept("interval 80%", model.predict_interval(rows, coverage=0.8, level="cluster", **ids))
        if not hasattr(model, "predict_proba"):  # a class is one of two
            found |= kept("interval with noise", model.predict_interval(rows, noise=True, **ids))
        found |= kept("reliability", np.asarray(model.reliability()["reliability"]))
    return found


# The data


@cache
def homes() -> pl.DataFrame:
    """The radon survey with a count, a yes or no, and a weight, for the other families."""
    index = np.arange(len(datasets.load_radon()))
    return datasets.load_radon().with_columns(
        high=pl.col("radon") > 4,
        count=pl.col("radon").round(0).clip(0, 30).cast(pl.Int64),
        weight=pl.Series(0.5 + (7 * index % 11) / 8),
    )


@cache
def some_homes() -> pl.DataFrame:
    """Of four states, every other home."""
    return homes().filter(pl.col("state").is_in(["AZ", "IN", "MN", "MO"])).gather_every(2)


@cache
def drawn(family: str, client_sd: float = 0.5, seed: int = 3) -> pl.DataFrame:
    """A small table of 5 clusters and 30 clients of few rows, with a weight, an offset and a category."""
    found = datasets.simulate(
        family, clusters=5, clients=6, rows=8, d=3, wbar=0.4, cluster_sd=0.7, client_sd=client_sd, intercept=True,
        equal_rows=False, seed=seed,
    ).frame()  # fmt: skip
    index = np.arange(len(found))
    return found.drop("x0").with_columns(
        client=pl.format("c{}", pl.col("client")),
        cluster=pl.format("k{}", pl.col("cluster")),
        y=pl.col("y") if family == "gaussian" else pl.col("y").cast(pl.Int64),
        weight=pl.Series(0.5 + (5 * index % 7) / 4),
        shift=pl.Series(((3 * index) % 10 - 4.5) / 9),
        kind=pl.Series(np.array(["low", "mid", "top"])[(index // 2) % 3]),
    )


def new_rows(frame: pl.DataFrame, client: str = "client", cluster: str = "cluster") -> pl.DataFrame:
    """Four rows: two of clients that are known, one of an unseen client, one of an unseen cluster too."""
    rows = frame[[0, len(frame) // 2, 1, 2]]
    names, groups = rows[client].to_list(), rows[cluster].to_list()
    return rows.with_columns(
        pl.Series(client, [*names[:2], "nobody's", "nobody's"]), pl.Series(cluster, [*groups[:3], "nowhere"])
    )


# Ways to fit

DRAWN = {"formula": "y ~ x1 + x2", "client": "client", "cluster": "cluster"}
HOMES = {"formula": "log_radon ~ floor", "client": "county", "cluster": "state"}


def fitted(family: str, frame: pl.DataFrame, **settings: Any) -> Any:
    with quiet():
        return ESTIMATORS[family](**{"random_state": 0, **common(settings)}).fit(frame)


def common(settings: dict[str, Any]) -> dict[str, Any]:
    """The paper's common probability of an exchange within clusters, for which the record was made."""
    if settings.get("solver") not in ("l2gd", "al2sgd_plus"):
        return settings
    return {**settings, "options": {"p": "common", **(settings.get("options") or {})}}


@contextmanager
def quiet() -> Iterator[None]:
    """Whether a fit converged is recorded; it need not be said."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", covey.ConvergenceWarning)
        yield


def add(name: str, what: Callable[[], Numbers]) -> None:
    if name in FITS:
        raise ValueError(f"There are two fits called {name!r}.")
    FITS[name] = what


def add_drawn(name: str, family: str = "gaussian", client_sd: float = 0.5, **settings: Any) -> None:
    """A fit to a small table that is drawn."""

    def run() -> Numbers:
        frame = drawn(family, client_sd)
        return numbers_of(fitted(family, frame, **{**DRAWN, **settings}), new_rows(frame))

    add(name, run)


def add_homes(name: str, family: str = "gaussian", whole: bool = False, **settings: Any) -> None:
    """A fit to the radon survey, or to some of it."""

    def run() -> Numbers:
        frame = homes() if whole else some_homes()
        return numbers_of(fitted(family, frame, **{**HOMES, **settings}), new_rows(frame, "county", "state"))

    add(name, run)


def add_sites(name: str, family: str = "gaussian", data: str = "drawn", sites: int | str = 3, **settings: Any) -> None:
    """A fit across sites; ``secure``, ``private`` and ``noise_seed`` are the operator's."""
    operator = {key: settings.pop(key) for key in ("secure", "private", "noise_seed") if key in settings}

    def run() -> Numbers:
        frame, columns = (drawn(family), DRAWN) if data == "drawn" else (some_homes(), HOMES)
        return across(frame, {"family": family, **columns, **common(settings)}, sites, **operator)

    add(name, run)


def across(
    frame: pl.DataFrame,
    settings: Mapping[str, Any],
    sites: int | str,
    *,
    secure: bool = False,
    private: Mapping[str, Any] | None = None,
    noise_seed: int | None = None,
) -> Numbers:
    """What the operator of a run across sites is left with, and each site of its own clients."""
    spec = internals("Spec")(**settings)
    terms = internals("Terms")(secure=secure, private=None if private is None else internals("Privacy")(**private))
    with tempfile.TemporaryDirectory() as folder, quiet():
        here, there = Path(folder) / "operator", Path(folder) / "sites"
        simulate_sites = internals("simulate")
        settings = {"settings" if "settings" in signature(simulate_sites).parameters else "terms": terms}
        run = simulate_sites(frame, spec, sites, **settings, models=there, out=here, noise_seed=noise_seed)
        operator = covey.load(here)
        found = kept("cluster", operator.cluster_coef_) | kept("global", operator.global_coef_)
        found |= convergence(operator.convergence_) | {"exchanges in all": len(run.outcome.exchanges)}
        found |= account(run.outcome.model.history, run.outcome.model.ledger)
        if learns(operator):
            found |= components(operator.components_) | intervals(operator)
        if run.outcome.privacy is not None:
            found |= {"epsilon": [_plain(run.outcome.privacy["epsilon"])]}
        for path in sorted(each.parent for each in there.rglob("model.json")):
            own = covey.load(path)
            found |= kept(f"client at {path.name}", own.coef_)
            if learns(own):
                frames = own.coef_frame("client")
                found |= kept(f"std_error at {path.name}", np.asarray(frames["std_error"]))
    return found


def add_resumed(name: str, family: str, stop: int, **settings: Any) -> None:
    """A run that is stopped, and goes on from its checkpoint to the bits of one that was not."""

    def run() -> Numbers:
        frame = drawn(family)
        straight = fitted(family, frame, **{**DRAWN, **settings})
        with tempfile.TemporaryDirectory() as folder:
            options = {**settings.get("options", {}), "checkpoint": str(Path(folder) / "run.npz")}
            fitted(family, frame, **{**DRAWN, **settings, "options": options, "max_iter": stop})
            resumed = fitted(family, frame, **{**DRAWN, **settings, "options": options})
        found = numbers_of(resumed)
        return {**found, "as one that was not stopped": found == numbers_of(straight)}

    add(name, run)


# The fits

FAMILIES = ("gaussian", "bernoulli", "poisson")
GIVEN = {"gamma": 2.0, "lam": 1.5}


def _given() -> None:
    for family in FAMILIES:
        add_drawn(f"given: {family}", family, **GIVEN)
    add_homes("given: radon, sweep", whole=True, gamma=6.0, lam=4.0)
    add_homes("given: radon, newton for a linear model", solver="newton", gamma=6.0, lam=4.0)
    add_homes("given: radon, high or not", "bernoulli", formula="high ~ floor", gamma=6.0, lam=4.0)
    add_homes("given: radon, counts", "poisson", formula="count ~ floor", gamma=6.0, lam=4.0, weights="weight")
    add_drawn("given: categories and an interaction", formula="y ~ x1 * kind + x2", **GIVEN)
    add_drawn("given: weights, gaussian", weights="weight", **GIVEN)
    add_drawn("given: weights, bernoulli", "bernoulli", weights="weight", **GIVEN)
    add_drawn("given: offset, gaussian", offset="shift", **GIVEN)
    add_drawn("given: weights and offset, poisson", "poisson", weights="weight", offset="shift", **GIVEN)
    add_drawn("given: ridge, gaussian", ridge=0.7, **GIVEN)
    add_drawn("given: ridge, bernoulli", "bernoulli", ridge=0.3, **GIVEN)
    add_drawn("given: mean over rows, gaussian", reduction="mean", gamma=0.3, lam=0.2)
    add_drawn("given: mean over rows, weights, poisson", "poisson", reduction="mean", weights="weight", gamma=0.3, lam=0.2)
    add_drawn("given: standardize, gaussian", standardize=True, **GIVEN)
    add_drawn("given: standardize, bernoulli", "bernoulli", standardize=True, **GIVEN)
    add_drawn("given: james_stein, gaussian", james_stein=True, formula="y ~ x1 * kind + x2", **GIVEN)
    add_drawn("given: james_stein, bernoulli", "bernoulli", james_stein=True, **GIVEN)
    add_drawn("given: alpha", alpha=0.3, gamma=2.0)
    add_drawn("given: one gamma for each client, one lam for each cluster", gamma=by_client(), lam=by_cluster())
    add_drawn("given: clusters as one, poisson", "poisson", gamma=2.0, lam=math.inf)
    add_drawn("given: clusters on their own", gamma=2.0, lam=0.0)
    add("given: plain arrays", _arrays)
    add("given: rows enough for threads", _threads)
    for name in ("single-model", "locally-trained", "single-cluster"):
        add_drawn(f"baseline: {name}, gaussian", baseline=name)
        add_drawn(f"baseline: {name}, bernoulli", "bernoulli", baseline=name)
    for family in FAMILIES:
        add_drawn(f"cross-validated: {family}", family, penalty="cv", formula="y ~ x1", random_state=4)


def _learned() -> None:
    for family in FAMILIES:
        for kind in ("isotropic", "diagonal", "full"):
            add_drawn(f"learned: {family}, {kind}", family, formula="y ~ x1", covariance=kind)
    add_drawn("learned: ml", penalty="ml")
    add_drawn("learned: per_cluster", per_cluster=True, vary=["Intercept"])
    add_drawn("learned: per_cluster, poisson", "poisson", per_cluster=True, formula="y ~ x1", vary=["Intercept"])
    add_drawn("learned: vary and covariance by level", vary={"client": ["Intercept"], "cluster": ["Intercept", "x1"]},
              covariance={"cluster": "full"})  # fmt: skip
    add_drawn("learned: weights", weights="weight", formula="y ~ x1")
    add_drawn("learned: weights and offset, bernoulli", "bernoulli", weights="weight", offset="shift", vary=["Intercept"])
    add_drawn("learned: offset, poisson", "poisson", offset="shift", vary=["Intercept"])
    add_drawn("learned: standardize", standardize=True)
    add_drawn("learned: clients that were drawn alike", client_sd=0.0, formula="y ~ x1")
    add_drawn("learned: without clusters", cluster=None)
    add_drawn("learned: james_stein", james_stein=True, formula="y ~ x1 * kind + x2")
    add_drawn("learned: al2sgd_plus", solver="al2sgd_plus", tol=1e-5)
    alone = {"client": None, "cluster": None}
    add_homes("learned: radon, bars", whole=True, formula="log_radon ~ floor + (1 + floor | state/county)", **alone)
    add_homes("learned: radon, double bars", formula="log_radon ~ floor + (1 + floor || state/county)", **alone)
    add_homes("learned: radon, bars of each level", formula="log_radon ~ floor + (1 | state) + (1 + floor | county)")
    add_homes("learned: radon, high or not", "bernoulli", formula="high ~ floor + (1 | state/county)", **alone)
    add_homes("learned: radon, weights", weights="weight")


def _afterwards() -> None:
    add("afterwards: clients join and leave, gaussian", lambda: _updated("gaussian"))
    add("afterwards: clients join and leave, poisson", lambda: _updated("poisson"))
    add("afterwards: bootstrap, gaussian", lambda: _bootstrap("gaussian", 4))
    add("afterwards: bootstrap, bernoulli", lambda: _bootstrap("bernoulli", 2))
    add("afterwards: saved and loaded", _saved)
    add("afterwards: plan", _plan)


def _randomised() -> None:
    for solver in ("l2gd", "al2sgd_plus", "one_coin"):
        for seed in (0, 1):
            more = {"max_iter": 2000} if solver != "al2sgd_plus" else {"tol": 1e-6}
            add_drawn(f"random: {solver}, seed {seed}", solver=solver, random_state=seed, **more, **GIVEN)
        add_drawn(f"random: {solver}, bernoulli", "bernoulli", solver=solver, max_iter=300, random_state=2, **GIVEN)
    add_drawn("random: l2gd, switching steps", solver="l2gd", options={"steps": "switching"}, max_iter=2000, **GIVEN)
    add_drawn("random: l2gd, switching steps, poisson", "poisson", solver="l2gd", options={"steps": "switching", "every": 50},
              weights="weight", max_iter=300, **GIVEN)  # fmt: skip
    add_drawn("random: l2gd, majority vote", solver="l2gd", options={"vote": "majority", "tau": 0.4}, max_iter=500, **GIVEN)
    add_drawn("random: l2gd, unequal gamma", solver="l2gd", gamma=by_client(), lam=1.5, max_iter=500)
    add_drawn("random: l2gd, alpha", solver="l2gd", gamma=2.0, alpha=0.3, options={"p0": 0.2, "p": 0.3}, max_iter=500)
    add_drawn("random: al2sgd_plus, majority vote", solver="al2sgd_plus", options={"vote": "majority"}, max_iter=500, **GIVEN)
    add_drawn("random: al2sgd_plus, unequal gamma", solver="al2sgd_plus", gamma=by_client(), lam=1.5, max_iter=500)
    add_drawn("random: al2sgd_plus, alpha, poisson", "poisson", solver="al2sgd_plus", gamma=2.0, alpha=0.3, ridge=0.1,
              max_iter=300)  # fmt: skip
    add_drawn("random: one_coin, mean over rows", solver="one_coin", reduction="mean", gamma=0.3, lam=0.2, max_iter=500)
    add_homes("random: radon, al2sgd_plus", solver="al2sgd_plus", gamma=6.0, lam=4.0, tol=1e-5)
    add_homes("random: radon, l2gd", solver="l2gd", gamma=6.0, lam=4.0, max_iter=1000)
    add_resumed("resumed: newton", "poisson", 3, solver="newton", **GIVEN)
    add_resumed("resumed: l2gd", "gaussian", 137, solver="l2gd", max_iter=400, **GIVEN)
    add_resumed("resumed: l2gd, bernoulli", "bernoulli", 137, solver="l2gd", max_iter=400, options={"every": 40}, **GIVEN)
    add_resumed("resumed: al2sgd_plus", "gaussian", 137, solver="al2sgd_plus", max_iter=400, **GIVEN)


def _across_sites() -> None:
    few = {"formula": "y ~ x1", **GIVEN}
    add_sites("sites: sweep", **GIVEN)
    add_sites("sites: sweep, radon, a site for each state", data="homes", sites="state", gamma=6.0, lam=4.0)
    add_sites("sites: newton, bernoulli", "bernoulli", **GIVEN)
    add_sites("sites: newton, poisson, weights and offset", "poisson", weights="weight", offset="shift", **GIVEN)
    add_sites("sites: james_stein", james_stein=True, formula="y ~ x1 * kind + x2", **GIVEN)
    add_sites("sites: standardize", standardize=True, **GIVEN)
    add_sites("sites: categories, alpha", formula="y ~ x1 + kind", gamma=2.0, alpha=0.3)
    add_sites("sites: REML", formula="y ~ x1")
    add_sites("sites: REML, standardize, full", formula="y ~ x1", standardize=True, covariance="full")
    add_sites("sites: REML, per_cluster", per_cluster=True, vary=["Intercept"])
    add_sites("sites: REML, radon, bars", data="homes", client=None, cluster=None,
              formula="log_radon ~ floor + (1 + floor | state/county)")  # fmt: skip
    add_sites("sites: Laplace, bernoulli", "bernoulli", formula="y ~ x1", vary=["Intercept"])
    add_sites("sites: Laplace, poisson", "poisson", formula="y ~ x1", covariance="isotropic")
    for solver in ("l2gd", "al2sgd_plus", "one_coin"):
        add_sites(f"sites: {solver}", solver=solver, max_iter=60, seed=1, **few)
    add_sites("sites: al2sgd_plus, majority vote, bernoulli", "bernoulli", solver="al2sgd_plus", max_iter=40,
              options={"vote": "majority"}, **few)  # fmt: skip
    add_sites("sites: masked sweep", secure=True, **GIVEN)
    add_sites("sites: masked newton, bernoulli", "bernoulli", secure=True, **GIVEN)
    add_sites("sites: masked REML", formula="y ~ x1", vary=["Intercept"], secure=True)
    add_sites("sites: masked l2gd", solver="l2gd", max_iter=30, secure=True, **few)
    private = {"noise": 0.5, "clip": 2.0, "rounds": 2}
    add_sites("sites: private, gaussian", private=private, noise_seed=7, **few)
    add_sites("sites: private, poisson", "poisson", private={**private, "rounds": 3}, noise_seed=8, **few)
    add_sites("sites: private and masked", private=private, noise_seed=9, secure=True, **few)


def by_client() -> dict[str, float]:
    return {f"c{at}": 0.5 + (at * 7 % 10) / 2 for at in range(30)}


def by_cluster() -> dict[str, float]:
    return {f"k{at}": 0.5 + at for at in range(5)}


def _arrays() -> Numbers:
    """Ids as arrays, and no names."""
    frame = drawn("gaussian")
    X, y = frame[["x1", "x2"]].to_numpy(), frame["y"].to_numpy()
    ids = {name: frame[name].to_numpy() for name in ("client", "cluster")}
    with quiet():
        model = HierarchicalRegressor(**GIVEN).fit(X, y, sample_weight=frame["weight"].to_numpy(), **ids)
    rows = new_rows(frame)
    return numbers_of(model, X[[0, 1, 2, 3]], **{name: rows[name].to_numpy() for name in ids})


def _threads() -> Numbers:
    """So many numbers to read that threads share them."""
    table = datasets.simulate("bernoulli", clusters=20, clients=25, rows=80, d=7, seed=6).frame()
    settings = {"client": "client", "cluster": "cluster", "formula": "y ~ x0 + x1 + x2 + x3 + x4 + x5 + x6"}
    return numbers_of(fitted("bernoulli", table, **settings, **GIVEN))


def _updated(family: str) -> Numbers:
    frame = drawn(family)
    model = fitted(family, frame, **{**DRAWN, "formula": "y ~ x1"})
    joining = frame[5:12].with_columns(client=pl.lit("newcomer"), cluster=pl.lit("k2"))
    elsewhere = frame[20:25].with_columns(client=pl.lit("far away"), cluster=pl.lit("k new"))
    with quiet():
        larger = model.add_clients(joining).add_clients(elsewhere)
        smaller = larger.remove_clients(["c3", "newcomer"])
    found: Numbers = {}
    for name, other in (("larger", larger), ("smaller", smaller)):
        found |= {f"{name}: {key}": value for key, value in numbers_of(other, new_rows(frame)).items()}
    return found


def _bootstrap(family: str, draws: int) -> Numbers:
    frame = drawn(family)
    model = fitted(family, frame, **{**DRAWN, "formula": "y ~ x1", "vary": ["Intercept"], "random_state": 5})
    with quiet():
        found = model.bootstrap(*(() if family == "gaussian" else (frame,)), draws=draws)
    return {
        **{name: value for each in ("sd", "std_error", "lower", "upper") for name, value in kept(each, found[each]).items()},
        **_tests(model),
    }


def _tests(model: Any) -> Numbers:
    found: Numbers = {}
    for level in ("client", "cluster"):
        test = model.likelihood_ratio(level)
        found |= {f"{level} statistic": [_plain(test.statistic)], f"{level} p_value": [_plain(test.p_value)]}
    return found


def _saved() -> Numbers:
    """With and without the clients' sums, of penalties learned and given."""
    found: Numbers = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, family, settings in (("learned", "poisson", {}), ("given", "bernoulli", GIVEN)):
            frame = drawn(family)
            model = fitted(family, frame, **{**DRAWN, "formula": "y ~ x1 + kind", "vary": None, **settings})
            for sums in (True, False):
                again = covey.load(model.save(Path(folder) / f"{name} {sums}", sums=sums))
                own = coefficients(again) | convergence(again.convergence_) | predictions(again, new_rows(frame))
                if learns(again):
                    own |= components(again.components_) | intervals(again, new_rows(frame) if sums else None)
                found |= {f"{name}, {'with' if sums else 'without'} sums: {key}": value for key, value in own.items()}
    return found


def _plan() -> Numbers:
    """Iterations and exchanges that theory promises; bytes, and time, which depends on them, are left out."""
    found: Numbers = {}
    for family in FAMILIES:
        plan = covey.plan(drawn(family), family=family, ridge=0.1, **DRAWN, **GIVEN)
        table = plan.frame
        found |= {f"{family} solvers": " ".join(table["solver"].to_list())}
        for name in ("iterations", "within", "between"):
            found |= kept(f"{family} {name}", table[name].cast(pl.Float64).to_numpy())
        found |= {f"{family} {name}": [_plain(getattr(plan.known, name))] for name in ("L", "L_row", "mu", "C1", "C2")}
    return found


for _add in (_given, _learned, _afterwards, _randomised, _across_sites):
    _add()


# The record


def record(only: str = "", say: Callable[[str], None] = lambda _: None) -> dict[str, Numbers]:
    """All fits, or those whose name contains ``only``; of one that fails, why."""
    found: dict[str, Numbers] = {}
    for name, run in FITS.items():
        if only in name:
            before = time.perf_counter()
            try:
                found[name] = run()
            except Exception as problem:  # the others are still worth their while
                found[name] = {"failed": f"{type(problem).__name__}: {problem}"}
            say(f"{time.perf_counter() - before:7.2f} s  {name}")
    return found


def text(found: Mapping[str, Numbers]) -> str:
    """One line for each quantity."""
    fits = []
    for name, numbers in found.items():
        lines = [f"  {json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in numbers.items()]
        fits.append(f"{json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n}")
    return "{\n" + ",\n".join(fits) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Record small fits of every kind, to the last bit.")
    parser.add_argument("--out", type=Path, help="the file to write; by default the screen")
    parser.add_argument("--only", default="", help="fits whose name contains this")
    parser.add_argument("--quiet", action="store_true", help="do not tell how long each fit took")
    asked = parser.parse_args()

    def say(line: str) -> None:
        if not asked.quiet:
            print(line, file=sys.stderr, flush=True)

    say(f"covey at {Path(covey.__file__).parent}")
    before = time.perf_counter()
    found = record(asked.only, say)
    say(f"{time.perf_counter() - before:7.2f} s  {len(found)} fits")
    if asked.out is None:
        print(text(found), end="")
    else:
        asked.out.write_text(text(found), encoding="utf-8")
    failed = {name: numbers["failed"] for name, numbers in found.items() if "failed" in numbers}
    for name, why in failed.items():
        print(f"{name} failed: {why}", file=sys.stderr)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
