"""The paper's application: who answers a charity's letter, a logistic model for every ZIP code (tables cross_tab and acc_tab).

A fifth of each ZIP's rows is held out. Both penalties are chosen on the rest by cross-validation of the mean client
cross-entropy over the paper's grid of 33 x 33. The paper's data are private; see :mod:`.mailings` for what stands in for them.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import polars as pl

from covey._typing import Floats
from covey.errors import ConvergenceWarning, DataError
from covey.fitting.selection import LOCAL_RIDGE, Search, client_losses, locally_trained, search, single_model
from covey.losses import Bernoulli, loss_of
from covey.objective.objective import Penalty
from covey.reproduce import paper
from covey.reproduce.mailings import Mailing
from covey.reproduce.study import Claim, Say, Study, Table, generator, silent, whole
from covey.solvers import minimise
from covey.solvers.first_order.loop import ControlOptions
from covey.tables.rows import GroupedData

GRID = 10.0 ** np.arange(-2.0, 2.0001, 0.125)  # 33 points: 10^-2, 10^-1.875, ..., 10^2
QUICK_GRID = GRID[::4]
TEST = 0.2
WORST = 100.0  # the paper counts an overflow as this; here nothing overflows, but a client may still do as badly

MODELS = ("locally-trained", "single-model", "hierarchical")

RIDGES = (1e-2, 1e-3, 1e-4, 1e-6)
"""For clients alone: most have no finite optimum without one."""


@dataclass(frozen=True)
class Scores:
    """Cross-entropy and accuracy of each client on its held-out rows."""

    entropy: Floats
    accuracy: Floats

    @classmethod
    def of(cls, theta: Floats, held: GroupedData) -> Scores:
        tested = held.rows_per_client > 0
        right = (held.margin(theta) > 0) == (held.y == 1)
        share = np.add.reduceat(right, held.client_ptr[:-1][tested]) / held.rows_per_client[tested]
        return cls(np.minimum(client_losses(theta, held, Bernoulli())[tested], WORST), share)


def study(mailing: Mailing, *, name: str = "donors", seed: int = 0, quick: bool = False, say: Say = silent) -> Study:
    """Split, choose the penalties, fit, and score every ZIP code; quick: a grid of 9 x 9."""
    grid, data = QUICK_GRID if quick else GRID, mailing.data
    rng = generator(seed, 5)
    train, held = data.split(TEST, rng)
    if held.n_rows == 0:
        raise DataError("Holding out a fifth of each ZIP's rows leaves none to test on; give ZIPs with more rows.")
    for part, words in ((data, "all"), (train, "all training")):
        if part.y.min() == part.y.max():
            raise DataError(f"The outcome is {part.y[0]:g} in {words} rows; a model of who answers needs both.")
    found = search(
        train, Bernoulli(), gammas=grid, lams=grid, score="client", seed=rng, progress=lambda a, b: say("penalties", a, b)
    )
    fits = {"locally-trained": locally_trained, "single-model": single_model}
    scores = {}
    for at, model in enumerate(MODELS):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # clients whose classes are separable: the table shows them
            if model == "hierarchical":
                fit = minimise(train, Bernoulli(), Penalty.of(train.hierarchy, gamma=found.gamma, lam=found.lam))
            else:
                fit = fits[model](train, Bernoulli())
        scores[model] = Scores.of(fit.theta, held)
        say("models", at + 1, len(MODELS))
    iterations = 500 if quick else 5000
    paper_way = unconverged(train, held, iterations, whole(rng), say)
    entropy, accuracy = entropy_table(scores), accuracy_table(scores)
    alone = entropy_table({f"{ridge:g}": _alone(train, held, ridge) for ridge in RIDGES}).rename({"model": "ridge"})
    return Study(
        name,
        f"Donors: a logistic model for every ZIP code, from {mailing.source}",
        {"source": mailing.source, "grid": len(grid), "folds": 5, "test": TEST, "seed": seed},
        (*_findings(scores, found), _about_conjecture(paper_way, iterations)),
        _claims(mailing, data, found, entropy, accuracy),
        (
            Table("cross-entropy", "Cross-entropy of each ZIP code on its held-out rows", entropy, ALONE),
            Table("accuracy", "Accuracy of each ZIP code on its held-out rows", accuracy, RATIO),
            Table(
                "conjecture",
                f"The paper's penalties and algorithm: after {iterations:,} iterations, and at the minimum",
                entropy_table(paper_way),
            ),
            Table("alone", "Trained alone, by the ridge that gives separable ZIP codes an optimum: cross-entropy", alone),
            Table("penalties", "Cross-validated mean client cross-entropy", _grid_table(found), digits=6, shown=False),
            Table("histogram", "ZIP codes by cross-entropy", histogram(scores), shown=False),
        ),
        (*mailing.lines, *_vanished(train, held)),
        quick=quick,
    )


RATIO = (
    "Ratio: share of ZIP codes whose accuracy is no less than under the hierarchical model; ratio, ours: share whose accuracy "
    "under the hierarchical model is no less. The paper's caption allows both readings."
)
ALONE = f"Locally-trained models carry a ridge of {LOCAL_RIDGE:g}, on which their numbers depend (table 'alone')."


def entropy_table(scores: dict[str, Scores]) -> pl.DataFrame:
    """Average, sd, quartiles and maximum over clients, and how many are above 1."""
    rows = []
    for model, score in scores.items():
        above = {"max": float(score.entropy.max()), "above 1": int((score.entropy > 1).sum()), "ZIPs": len(score.entropy)}
        rows.append({"model": model, **_quartiles(score.entropy), **above})
    return pl.DataFrame(rows)


def accuracy_table(scores: dict[str, Scores]) -> pl.DataFrame:
    """Average, sd and quartiles over clients, and the share no less accurate than under the hierarchical model."""
    ours = scores["hierarchical"].accuracy
    rows = []
    for model, score in scores.items():
        ratios = {"ratio": float((score.accuracy >= ours).mean()), "ratio, ours": float((ours >= score.accuracy).mean())}
        rows.append({"model": model, **_quartiles(score.accuracy), **ratios})
    return pl.DataFrame(rows)


def _alone(train: GroupedData, held: GroupedData, ridge: float) -> Scores:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return Scores.of(locally_trained(train, Bernoulli(ridge=ridge)).theta, held)


def unconverged(train: GroupedData, held: GroupedData, iterations: int, seed: int, say: Say) -> dict[str, Scores]:
    """The paper's conjecture: its model's cross-entropy is above the single model's because it was stopped too early.

    The paper's settings, lam = 0.01, gamma = 1.36, p = 0.1, a step of 1e-3 and 5000 iterations, on each client's mean loss
    (with the sum, that step diverges on large clients), beside the minimum of the same objective.
    """
    loss, penalty = loss_of("bernoulli", "mean"), Penalty.of(train.hierarchy, gamma=paper.GAMMA, lam=paper.LAM)

    def progress(t: int, *_: float) -> None:
        say("the paper's iterate", t, iterations)

    every = max(1, iterations // 20)
    watch: ControlOptions = {"tol": 0.0, "max_iter": iterations, "every": every, "seed": seed, "progress": progress}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        stopped = minimise(train, loss, penalty, solver="one_coin", p=0.1, eta=1e-3, mu=1e-3, **watch)
        fits = {f"after {iterations:,} iterations": stopped.theta, "minimum": minimise(train, loss, penalty).theta}
        fits["single-model"] = single_model(train, Bernoulli()).theta
    return {name: Scores.of(theta, held) for name, theta in fits.items()}


def histogram(scores: dict[str, Scores]) -> pl.DataFrame:
    """How many clients have a cross-entropy in each bin of 0.05, the last bin being 3 and more."""
    edges = np.append(np.arange(0, 3.0001, 0.05), np.inf)
    counts = {model: np.histogram(score.entropy, edges)[0] for model, score in scores.items()}
    return pl.DataFrame({"from": edges[:-1], **counts})


def _quartiles(values: Floats) -> dict[str, float]:
    cuts = np.quantile(values, [0.25, 0.5, 0.75])
    return {
        "average": float(values.mean()),
        "sd": float(values.std()),
        **{name: float(cut) for name, cut in zip(("25%", "50%", "75%"), cuts, strict=True)},
    }


def _grid_table(found: Search) -> pl.DataFrame:
    columns = {f"lam={lam:.4g}": found.scores[:, j] for j, lam in enumerate(found.lams)}
    return pl.DataFrame({"gamma": found.gammas, **columns})


def _vanished(train: GroupedData, held: GroupedData) -> list[str]:
    """What the split did to clients too small for it."""
    untested = int(((held.rows_per_client == 0) & (train.rows_per_client > 0)).sum())
    if untested == 0:
        return []
    what = (
        "ZIP is too small to have a held-out row; it is"
        if untested == 1
        else "ZIPs are too small to have a held-out row; they are"
    )
    return [f"{untested:,} {what} trained on and not scored."]


def _findings(scores: dict[str, Scores], found: Search) -> tuple[str, ...]:
    ours = scores["hierarchical"].entropy
    chosen = [f"{name} = {value:.3g}{_edge(value, grid)}" for name, value, grid in _penalties(found)]
    across = float(np.ptp(found.scores[found.gammas == found.gamma]) / max(np.ptp(found.scores), 1e-300))
    said = [f"Cross-validation chooses {' and '.join(chosen)}; along lam the score moves by {_percent(across)} of its range."]
    for rival in ("single-model", "locally-trained"):
        apart = ours - scores[rival].entropy
        error = apart.std() / np.sqrt(len(apart))
        said.append(
            f"The hierarchy's mean client cross-entropy is {ours.mean():.4f}, against {scores[rival].entropy.mean():.4f} "
            f"{'for the single model' if rival == 'single-model' else 'for models trained alone'}: a difference of "
            f"{apart.mean():+.4f}, {_words(float(apart.mean()), float(error))} (standard error {error:.4f})."
        )
    return tuple(said)


def _penalties(found: Search) -> tuple[tuple[str, float, Floats], ...]:
    return (("gamma", found.gamma, found.gammas), ("lam", found.lam, found.lams))


def _edge(value: float, grid: Floats) -> str:
    return " (the edge of the paper's grid)" if value in (grid.min(), grid.max()) else ""


def _percent(share: float) -> str:
    return f"{100 * share:.2g}%" if share >= 1e-5 else "less than 0.001%"


def _about_conjecture(scores: dict[str, Scores], iterations: int) -> str:
    """Whether the paper's model lost to the single one because it was stopped before it had converged."""
    stopped, least, single = (score.entropy for score in scores.values())
    lost, left = stopped - single, least - single
    error = float(left.std() / np.sqrt(len(left)))
    if lost.mean() <= 0:
        verdict = "the iterate does not lose here, so there is nothing to explain"
    elif left.mean() > 2 * error:
        verdict = f"converged, it still loses by {left.mean():.4f} (standard error {error:.4f}), so that is not why"
    elif left.mean() >= -2 * error:
        verdict = f"converged, it is level with the single model ({left.mean():+.4f}, standard error {error:.4f}), so it holds"
    else:
        verdict = f"converged, it wins by {-left.mean():.4f} (standard error {error:.4f}), so it holds"
    return (
        "The paper conjectures that its model lost to the single one (0.215 against 0.211) for want of convergence. With its "
        f"penalties the iterate after {iterations:,} iterations is at {stopped.mean():.4f}, the single model at "
        f"{single.mean():.4f}: {verdict}."
    )


def _words(difference: float, error: float) -> str:
    if abs(difference) <= 2 * error:
        return "no more than chance"
    return "better" if difference < 0 else "worse"


def _claims(
    mailing: Mailing, data: GroupedData, found: Search, entropy: pl.DataFrame, accuracy: pl.DataFrame
) -> tuple[Claim, ...]:
    """The paper's tables beside ours; none for a reader's own tables, whose charity the paper knows nothing of."""
    if mailing.why is None:
        return ()
    pairs = [
        ("ZIP codes", paper.CLIENTS, data.n_clients),
        ("income brackets", paper.CLUSTERS, data.n_clusters),
        ("gamma chosen", paper.GAMMA, found.gamma),
        ("lam chosen", paper.LAM, found.lam),
    ]
    columns = ("average", "sd", "25%", "50%", "75%")
    for measured, printed, frame, last in (
        ("cross-entropy", paper.CROSS_ENTROPY, entropy, "max"),
        ("accuracy", paper.ACCURACY, accuracy, "ratio"),
    ):
        for model, values in printed.items():
            ours = frame.filter(pl.col("model") == model).row(0, named=True)
            pairs += [
                (f"{model}: {measured}, {name}", value, ours[name])
                for name, value in zip((*columns, last), values, strict=True)
            ]
    for model, count in paper.ABOVE_ONE.items():
        ours = entropy.filter(pl.col("model") == model).row(0, named=True)
        pairs.append((f"{model}: ZIPs with cross-entropy above 1", count, ours["above 1"]))
    return tuple(Claim(what, there, here, None, mailing.why, comparable=False) for what, there, here in pairs)
