"""A personal head on frozen embeddings for every user: 2,000 users of 12 rows and 384 numbers each, all in one fit.

The embeddings are simulated: their spectrum falls like that of text embeddings, and every user has a centre of its own.
Each user's true head is a common head plus a personal part, on the leading directions of the embeddings. Penalties are
those of the simulation. The pooled head and the local heads are scikit-learn's; they get the best of three penalties on
held-out rows (local heads: of the first 200 users), which favours them.

python examples/embeddings.py --out pictures
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss

import covey
from covey.report.style import Theme, draw_on

TERMS, ROWS, HELD_OUT = 384, 12, 12
PENALTIES = (0.01, 0.1, 1.0)


def simulate(users: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings ``(users, rows, 384)`` and classes ``(users, rows)``; the first rows of a user are for training."""
    rng = np.random.default_rng(seed)
    spectrum = np.arange(1, TERMS + 1) ** -0.5
    directions = np.linalg.qr(rng.standard_normal((TERMS, TERMS)))[0]
    centres = rng.standard_normal((users, 1, TERMS))
    along = spectrum * (0.5 * centres + rng.standard_normal((users, ROWS + HELD_OUT, TERMS)))
    head, personal = rng.standard_normal(TERMS), 0.7 * rng.standard_normal((users, TERMS))
    margin = np.einsum("ura,ua->ur", along, head + personal)
    return along @ directions.T, (rng.random(margin.shape) < 1 / (1 + np.exp(-margin))).astype(int)


def local_heads(X: np.ndarray, y: np.ndarray, new: np.ndarray, C: float) -> np.ndarray:
    """Probabilities for held-out rows from one head for each user; a user of one class has its share, plus a half each."""
    found = np.empty(new.shape[:2])
    for user, (rows, classes) in enumerate(zip(X, y, strict=True)):
        found[user] = (classes.sum() + 0.5) / (len(classes) + 1)
        if 0 < classes.sum() < len(classes):
            found[user] = LogisticRegression(C=C, fit_intercept=False).fit(rows, classes).predict_proba(new[user])[:, 1]
    return found.ravel()


def timed(work: Callable[[], np.ndarray]) -> tuple[np.ndarray, float]:
    start = time.perf_counter()
    return work(), time.perf_counter() - start


def main(out: Path, small: bool = False, dark: bool = False) -> None:
    mpl.use("Agg")
    users = 150 if small else 2000
    embedded, labels = simulate(users)
    train, new, y, truth = embedded[:, :ROWS], embedded[:, ROWS:], labels[:, :ROWS], labels[:, ROWS:].ravel()
    flat = train.reshape(-1, TERMS)

    # --8<-- [start:code]
    def personal_heads() -> np.ndarray:
        user, new_user = np.repeat(np.arange(users), ROWS), np.repeat(np.arange(users), HELD_OUT)
        model = covey.HierarchicalClassifier(gamma=1 / 0.7**2, fit_intercept=False)
        model.fit(flat, y.ravel(), client=user)
        return model.predict_proba(new.reshape(-1, TERMS), client=new_user)[:, 1]

    # --8<-- [end:code]

    def pooled_head(C: float) -> np.ndarray:
        head = LogisticRegression(C=C, fit_intercept=False, max_iter=1000).fit(flat, y.ravel())
        return head.predict_proba(new.reshape(-1, TERMS))[:, 1]

    found = {f"{users:,} personal heads, covey": [timed(personal_heads)]}
    found["one pooled head, scikit-learn"] = [timed(lambda: pooled_head(C)) for C in PENALTIES]  # noqa: B023
    few = slice(200)
    tried = [log_loss(labels[few, ROWS:].ravel(), local_heads(train[few], y[few], new[few], C)) for C in PENALTIES]
    best_penalty = PENALTIES[int(np.argmin(tried))]
    found["local heads, scikit-learn"] = [timed(lambda: local_heads(train, y, new, best_penalty))]
    best = {}
    for name, tries in found.items():
        losses = [(log_loss(truth, p), float(((p > 0.5) == truth).mean()), seconds) for p, seconds in tries]
        best[name] = min(losses)
        print("{}: held-out log loss {:.3f}, accuracy {:.3f}, {:.1f} s".format(name, *best[name]))

    def draw(ax: mpl.axes.Axes, theme: Theme) -> str:
        for place, (loss, accuracy, seconds) in enumerate(best.values()):
            ax.plot(loss, -place, "o", ms=11, color=theme.cluster if place else theme.client)
            ax.text(loss, 0.16 - place, f"{100 * accuracy:.0f}% right, {seconds:.1f} s", ha="center")
        ax.set_yticks([0, -1, -2], [name.replace(", ", "\n") for name in best])
        ax.set_ylim(-2.4, 0.6)
        ax.margins(x=0.25)
        ax.set_xlabel("log loss of held-out rows (lower is better)")
        first, *others = best
        behind = [best[name][0] - best[first][0] for name in others]
        if min(behind) <= 0:
            return "Personal heads do not beat both alternatives here"
        below = f"{behind[0]:.3f} below a pooled head, {behind[1]:.3f} below local ones"
        return f"Personal heads have the lowest held-out log loss: {below}"

    ax = draw_on(None, draw, dark=dark, size=(7.5, 3.6))
    ax.figure.savefig(out / "embeddings.png", dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--small", action="store_true", help="few rows, for a test")
    parser.add_argument("--dark", action="store_true", help="for a dark ground")
    main(**vars(parser.parse_args()))
