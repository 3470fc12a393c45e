"""Cheap steps to the neighbourhood of an optimum, and a guess at the curvature there.

The steps are those of the MM algorithm for variance components (Zhou, Hu, Zhou and Lange 2019, J. Comput. Graph. Stat. 28).
The criterion's gradient in a covariance ``S`` is ``bend - pull`` (:class:`.Evaluation`), both positive semi-definite. A step
solves ``T bend T = S pull S`` for the next covariance ``T``; for a single variance that multiplies it by
``sqrt(pull / bend)``. It never raises the criterion of a linear model.
"""

from __future__ import annotations

import numpy as np

from covey._typing import Floats
from covey.variance.criterion import Criterion
from covey.variance.linear_likelihood import Evaluation
from covey.variance.parameters import Variation


def approach(criterion: Criterion, x: Floats, steps: int) -> tuple[Floats, Floats]:
    """Step from ``x`` as long as the criterion falls; where that ends, and a guess at the second derivatives there.

    There are ``steps`` steps, and up to five times as many while some parameter still more than doubles.
    """
    n = criterion.parameters.n_parameters
    here = criterion.evaluate(x)
    for step in range(5 * steps):
        moved = [mm_step(variation, part, bend, pull) for variation, part, bend, pull in _by_level(criterion, x, here)]
        ahead = np.concatenate([*moved, criterion.global_step(x, here)])
        there = criterion.evaluate(ahead)
        if not there.value < here.value:
            break
        doubled = (np.abs(ahead) > 2.0 * np.abs(x))[:n].any()
        x, here = ahead, there
        if step + 1 >= steps and not doubled:
            break
    units = criterion.tree.n_clients, criterion.tree.n_clusters
    parts = zip(_by_level(criterion, x, here), units, strict=True)
    curves = [curvature(variation, part, bend, count) for (variation, part, bend, _), count in parts]
    return x, np.concatenate([*curves, np.full(len(x) - n, 2.0)])


def _by_level(criterion: Criterion, x: Floats, here: Evaluation) -> list[tuple[Variation, Floats, Floats, Floats]]:
    """Of clients and of clusters: the variation, its parameters, bend and pull."""
    levels = []
    for (variation, part), G, pull in zip(criterion.parameters.split(x), (here.client, here.cluster), here.pull, strict=True):
        pull_here = variation.pick(pull)
        levels.append((variation, part, variation.pick(G) + pull_here, pull_here))
    return levels


def mm_step(variation: Variation, x: Floats, bend: Floats, pull: Floats) -> Floats:
    """The parameters of one level after one step from ``x``."""
    if variation.q == 0:
        return x
    L = variation.factors(x)
    S = L @ L.swapaxes(1, 2)
    if variation.kind == "full":
        values, vectors = np.linalg.eigh(bend)
        root = np.sqrt(np.maximum(values, 1e-12 * np.abs(values).max(axis=1, keepdims=True) + 1e-300))
        half, inverse_half = _recomposed(vectors, root), _recomposed(vectors, 1.0 / root)
        values, vectors = np.linalg.eigh(half @ S @ pull @ S @ half)
        middle = _recomposed(vectors, np.sqrt(np.maximum(values, 0.0)))
        return variation.of_covariances(inverse_half @ middle @ inverse_half)
    at = np.arange(variation.q)
    down, up = np.maximum(bend[:, at, at], 0.0), np.maximum(pull[:, at, at], 0.0)
    if variation.kind == "isotropic":
        down, up = down.sum(axis=1, keepdims=True), up.sum(axis=1, keepdims=True)
    ratio = np.clip(up / np.where(down > 0, down, 1.0), 1e-4, 1e4)
    return np.asarray(x * ratio.ravel() ** 0.25)


def curvature(variation: Variation, x: Floats, bend: Floats, units: int) -> Floats:
    """A guess at the second derivative in each parameter of one level.

    ``bend`` is a sum over ``units`` clients or clusters, and is taken to be made of equal parts.
    """
    L = variation.factors(x) / variation.unit[:, None]
    at = np.arange(variation.q)
    down = variation.unit**2 * np.maximum(bend[:, at, at], 1e-12)
    size = np.maximum((L**2).sum(axis=2), 1e-4)
    each = 4.0 * size * down**2 * variation.count / max(units, 1)
    if variation.kind == "full":
        rows, _ = np.tril_indices(variation.q)
        return np.asarray(each[:, rows]).ravel()
    if variation.kind == "isotropic" and variation.q:
        total = down.sum(axis=1, keepdims=True)
        return np.asarray(4.0 * size[:, :1] * total**2 * variation.count / (units * variation.q)).ravel()
    return np.asarray(each).ravel()


def _recomposed(vectors: Floats, values: Floats) -> Floats:
    return np.asarray(np.einsum("mab,mb,mcb->mac", vectors, values, vectors))
