"""Sums that do not depend on their order, nor on who added what: fixed point instead of floating point.

Floating-point sums change in their last digits with the order of the addends, so a sum over clients would depend on which
node holds which client. Here a number is a whole multiple of ``2^-96``, an integer modulo ``2^192`` kept as three limbs of
64 bits: adding is exact, has the same bits in any order and split, and can be masked by adding random integers.

An addend is rounded to the nearest multiple of ``2^-96``, ties to even: from ``2^-44`` in size on it is exactly itself, below
``2^-97`` it is 0. Whatever cannot be summed safely comes out as NaN, and that too does not depend on the order: beside the
integer goes the ``size`` of the addends, in whole multiples of ``2^64``, of which NaN, infinities and anything from ``2^94`` on
count :data:`TOO_LARGE` at once. Sizes below that mean that a sum of fewer than ``2^30`` addends is less than ``2^95`` and has
not wrapped around.

Numbers of which nobody knows how large they are, such as squared gradients from the start to the end of a run, have
:data:`WIDE` limbs, multiples of ``2^-288`` and less than ``2^286``. With ``n`` limbs 96, 64, 94 and 95 above are ``32n``,
``32n - 32``, ``32n - 2`` and ``32n - 1``.

Inside kernels (:mod:`.kernels`) a sum is a row of carry-save digits, each worth ``2^32`` of the one before it, and the size:
:func:`accumulate` adds a number by three integer additions, and :func:`from_digits` carries at the end.
"""

from covey.exact.kernels import TOO_LARGE, accumulate, accumulate_in, accumulate_moments, accumulate_rows
from covey.exact.sums import DIGITS, LIMBS, QUANTUM, WIDE, WIDE_DIGITS, Exact, from_digits, segment_sum, total

__all__ = [
    "DIGITS",
    "LIMBS",
    "QUANTUM",
    "TOO_LARGE",
    "WIDE",
    "WIDE_DIGITS",
    "Exact",
    "accumulate",
    "accumulate_in",
    "accumulate_moments",
    "accumulate_rows",
    "from_digits",
    "segment_sum",
    "total",
]
