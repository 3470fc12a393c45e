"""Compiled loops over rows and clients that count and sum before a search. Tests compare each with plain numpy."""

from __future__ import annotations

from numpy import empty

from covey._typing import Floats, Ints
from covey.compiling import njit
from covey.losses.kernels import FASTMATH
from covey.threads import BLOCK

ROWS = 1 << 12  # rows that are summed at a time


@njit(nogil=True, cache=True, fastmath=FASTMATH, error_model="numpy")  # type: ignore[untyped-decorator]
def sum_rows(
    begin: int, end: int, X: Floats, y: Floats, weights: Floats, offset: Floats, ones: Ints, sums: Floats
) -> None:  # fmt: skip
    """For each block of rows, set the numbers of ones in the columns, ``(blocks, d)``, and ``sums (blocks, 3, d + 1)``.

    With ``r = y - offset`` these are the sums of ``[X | y]``, of ``[X^2 | 0]``, and of ``w r [X | r]``. ``weights`` and
    ``offset`` may be empty.
    """
    n, d = X.shape
    weighted, shifted = len(weights) > 0, len(offset) > 0
    for block in range(begin, end):
        ones[block], sums[block] = 0, 0.0
        total, squares, products = sums[block, 0], sums[block, 1], sums[block, 2]
        for row in range(block * ROWS, min((block + 1) * ROWS, n)):
            response = y[row] - offset[row] if shifted else y[row]
            pull = weights[row] * response if weighted else response
            for a in range(d):
                x = X[row, a]
                ones[block, a] += x == 1.0
                total[a] += x
                squares[a] += x * x
                products[a] += pull * x
            total[d] += y[row]
            products[d] += pull * response


@njit(nogil=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def count_not_proportional(
    begin: int, end: int, A: Floats, diagonal: Floats, terms: Ints, precision: float, count: Ints
) -> None:  # fmt: skip
    """For each block of clients and pair of terms, count the clients with ``a'a b'b - (a'b)^2 > precision a'a b'b``."""
    n, q, d = A.shape
    for block in range(begin, end):
        count[block] = 0
        for i in range(block * BLOCK, min((block + 1) * BLOCK, n)):
            for a in range(q):
                for b in range(d):
                    full = diagonal[i, terms[a]] * diagonal[i, b]
                    count[block, a, b] += full - A[i, a, b] ** 2 > precision * max(full, 1e-300)


@njit(nogil=True, cache=True, fastmath=FASTMATH, error_model="numpy")  # type: ignore[untyped-decorator]
def count_not_determined(
    begin: int, end: int, A: Floats, diagonal: Floats, terms: Ints, inverse: Floats, share: float, count: Ints
) -> None:  # fmt: skip
    """For each block of clients and term, count the clients with ``a'a - A_a inverse A_a' > share a'a``."""
    n, q, d = A.shape
    for block in range(begin, end):
        along = empty(d)
        count[block] = 0
        for i in range(block * BLOCK, min((block + 1) * BLOCK, n)):
            for a in range(q):
                along[:] = 0.0
                for b in range(d):
                    for c in range(d):
                        along[c] += A[i, a, b] * inverse[b, c]
                fitted = 0.0
                for c in range(d):
                    fitted += along[c] * A[i, a, c]
                size = diagonal[i, terms[a]]
                count[block, a] += size - fitted > share * size
