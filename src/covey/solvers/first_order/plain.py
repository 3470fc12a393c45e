"""The moves of the randomised algorithms in plain numpy, for losses that compiled kernels do not have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from covey._typing import Floats, Ints
from covey.kernels import accumulate_rows
from covey.nodes.network import Node
from covey.solvers.first_order.protocol import ClientBlocks, Move, empty_digits
from covey.solvers.first_order.schedule import uniforms

if TYPE_CHECKING:
    from covey.solvers.first_order.al2sgd_plus import KatyushaBegin, KatyushaPoints
    from covey.solvers.first_order.l2gd import L2gdBegin


def l2gd_move(node: Node, clients: ClientBlocks, begin: L2gdBegin, move: Move) -> tuple[Floats, Ints]:
    """A step towards averages, then local gradient steps; returns the new coefficients, and the digits of the sums."""
    theta, blocks = node.coefficients(), clients.blocks
    out, sums = np.empty_like(theta), empty_digits(blocks, theta.shape[1])
    for block, j in enumerate(blocks.owner.tolist()):
        first, last = blocks.ptr[block : block + 2].tolist()
        data, part = node.data.clients(first, last), slice(first, last)
        at = theta[part] - node.gamma[part, None] * (move.pull.strength[j] * theta[part] - move.pull.force[j])
        for t in range(move.start[j], move.start[j] + move.steps[j]):
            at = at - begin.local[j] * begin.rate.at(t) * node.loss.gradient(data, at)
        out[part] = at
        if move.wanted[j]:
            accumulate_rows(sums[block], clients.share[part], out[part])
    return out, sums


def al2sgd_plus_move(
    node: Node, clients: ClientBlocks, begin: KatyushaBegin, points: KatyushaPoints, streams: Ints, move: Move
) -> tuple[Floats, Floats, Ints]:
    """The iteration that waited for averages, then local ones; returns the new ``y`` and ``z``, and the digits of the sums."""
    loss, X, target, weights, offset, scale, ridge, client_ptr = clients.operands
    y, z, pace, blocks = node.coefficients().copy(), points.z.copy(), begin.pace, clients.blocks
    sums = empty_digits(blocks, y.shape[1])
    for block, j in enumerate(blocks.owner.tolist()):
        part = slice(*blocks.ptr[block : block + 2].tolist())
        rows, local = node.data.rows_per_client[part], begin.local[j]
        filled, x = rows > 0, points.x[part]
        for s in range(-1 if move.exchanged[j] else 0, move.steps[j]):
            theta, g = pace.theta(x, y[part], z[part]), points.gradient[part].copy()
            if s < 0:
                g += node.gamma[part, None] * (move.pull.strength[j] * (theta - x) - move.pull.force[j])
            else:
                g += local * ridge * (theta - x)
                drawn = (uniforms(streams[part], int(move.start[j]) + s, 1)[:, 0] * rows).astype(np.int64)
                row = (client_ptr[part] + drawn)[filled]
                shift = offset[row] if len(offset) else 0.0
                margins = (shift + np.einsum("ia,ia->i", X[row], at[filled]) for at in (theta, x))
                here, there = (loss.slopes(margin, target[row]) for margin in margins)
                size = (local * rows * scale[part])[filled] * (weights[row] if len(weights) else 1.0)
                g[filled] += (size * (here - there))[:, None] * X[row]
            y[part] = theta - pace.eta * g
            z[part] = pace.b1 * z[part] + (1.0 - pace.b1) * theta + pace.b2 / pace.eta * (y[part] - theta)
        if move.wanted[j]:
            accumulate_rows(sums[block], clients.share[part], pace.theta(x, y[part], z[part]))
    return y, z, sums
