"""The kernels of the randomised algorithms in plain numpy, for any loss.

Losses that are not compiled are moved by these; tests compare the kernels with them. Arguments are those of the kernels, with
the loss itself in place of its code.
"""

from __future__ import annotations

import numpy as np

from covey._typing import Anything, Floats, Ints
from covey.kernels import accumulate_rows
from covey.losses import Loss
from covey.solvers.first_order.schedule import uniforms
from covey.tree.hierarchy import segment_sum


def l2gd_move(
    loss: Loss, X: Floats, y: Floats, weights: Floats, offset: Floats, scale: Floats, ridge: float, client_ptr: Ints,
    closed: bool, basis: Ints, vectors: Floats, curvature: Floats, minimiser: Floats, blocks: Ints, owner: Ints,
    gamma: Floats, share: Floats, strength: Floats, force: Floats, start: Ints, steps: Ints, local: Floats, step: float,
    mu: float, switch: int, wanted: Anything, theta: Floats, out: Floats, sums: Ints,
) -> None:  # fmt: skip
    """Pull, then local gradient steps, of each block of clients; the closed form of a quadratic is not used."""
    for block, j in enumerate(owner.tolist()):
        mine, rows = _slices(blocks, client_ptr, block)
        ptr = client_ptr[mine.start : mine.stop + 1] - client_ptr[mine.start]
        client_of_row = np.repeat(np.arange(len(ptr) - 1), np.diff(ptr))
        weight, shift = (values[rows] if len(values) else default for values, default in ((weights, 1.0), (offset, 0.0)))
        at = theta[mine] - gamma[mine, None] * (strength[j] * theta[mine] - force[j])
        for t in range(start[j], start[j] + steps[j]):
            eta = local[j] * (step if mu == 0.0 or t <= switch else (2.0 * t + 1.0) / ((t + 1.0) ** 2 * mu))
            margin = shift + np.einsum("la,la->l", X[rows], at[client_of_row])
            slopes = weight * loss.slopes(margin, y[rows])
            at = at - eta * (scale[mine, None] * segment_sum(slopes[:, None] * X[rows], ptr) + ridge * at)
        out[mine] = at
        if wanted[j]:
            accumulate_rows(sums[block], share[mine], out[mine])


def al2sgd_plus_move(
    loss: Loss, X: Floats, target: Floats, weights: Floats, offset: Floats, scale: Floats, ridge: float, client_ptr: Ints,
    streams: Anything, blocks: Ints, owner: Ints, gamma: Floats, share: Floats, strength: Floats, force: Floats,
    exchanged: Anything, start: Ints, steps: Ints, local: Floats, pace: tuple[float, float, float, float, float],
    wanted: Anything, x: Floats, gradient: Floats, y: Floats, z: Floats, y_out: Floats, z_out: Floats, sums: Ints,
) -> None:  # fmt: skip
    """The iteration that waited for an exchange, then local ones, of each block of clients."""
    eta, a1, a2, b1, b2 = pace
    for block, j in enumerate(owner.tolist()):
        mine, _ = _slices(blocks, client_ptr, block)
        first, rows = client_ptr[mine.start : mine.stop], np.diff(client_ptr[mine.start : mine.stop + 1])
        filled, anchor, at_y, at_z = rows > 0, x[mine], y[mine], z[mine]
        for s in range(-1 if exchanged[j] else 0, steps[j]):
            theta = a1 * at_z + a2 * anchor + (1.0 - a1 - a2) * at_y
            if s < 0:
                g = gradient[mine] + gamma[mine, None] * (strength[j] * (theta - anchor) - force[j])
            else:
                g = gradient[mine] + local[j] * ridge * (theta - anchor)
                row = (first + _draw_rows(streams[mine], int(start[j]) + s, rows))[filled]
                shift = offset[row] if len(offset) else 0.0
                margins = (shift + np.einsum("ia,ia->i", X[row], at[filled]) for at in (theta, anchor))
                here, there = (loss.slopes(margin, target[row]) for margin in margins)
                size = (local[j] * rows * scale[mine])[filled] * (weights[row] if len(weights) else 1.0)
                g[filled] += (size * (here - there))[:, None] * X[row]
            at_y = theta - eta * g
            at_z = b1 * at_z + (1.0 - b1) * theta + b2 / eta * (at_y - theta)
        y_out[mine], z_out[mine] = at_y, at_z
        if wanted[j]:
            accumulate_rows(sums[block], share[mine], a1 * at_z + a2 * anchor + (1.0 - a1 - a2) * at_y)


def _slices(blocks: Ints, client_ptr: Ints, block: int) -> tuple[slice, slice]:
    """The clients of a block, and their rows."""
    first, last = int(blocks[block]), int(blocks[block + 1])
    return slice(first, last), slice(int(client_ptr[first]), int(client_ptr[last]))


def _draw_rows(streams: Anything, t: int, rows: Ints) -> Ints:
    """A row of each client, uniform, from its stream at iteration ``t``."""
    drawn: Ints = (uniforms(streams.astype(np.uint64), t, 1)[:, 0] * rows).astype(np.int64)
    return drawn
