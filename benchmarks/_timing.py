"""Shared by the benchmarks: alternate two functions and compare their median times."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any


def seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def alternate(first: Callable[[], Any], second: Callable[[], Any], repeats: int = 7, pause: float = 0.3) -> tuple[float, float]:
    """Median seconds of each after one warm-up, taking turns; the pause lets the other's idle threads go to sleep."""
    first(), second()
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for function, spent in zip((first, second), times, strict=True):
            time.sleep(pause)
            spent.append(seconds(function))
    return median(times[0]), median(times[1])
