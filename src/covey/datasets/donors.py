"""Simulate the tables of a charity: appeals, gifts and ZIPs, with the coefficients that generated them.

The charity sends its appeals in waves. A logistic model draws the answer to each appeal. Its covariates are what the charity
knows about the donor on that day; :mod:`covey.reproduce.solicitations` computes the same covariates from the tables:

    logit P(gift) = a + b log(days since the last gift) + c log(number of gifts so far)

The coefficients (a, b, c) are those of the ZIP of the last gift. They vary around the coefficients of the ZIP's income bracket,
and these vary around global coefficients. The paper's donor data (arXiv:2204.13619, Section 6) have the same structure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import date

import numpy as np
import polars as pl

from covey._typing import Anything, Floats, Ints
from covey.errors import DataError
from covey.losses import loss_of

BRACKETS = ("poor or near-poor", "lower-middle", "middle", "upper-middle", "unknown")

_SHARES = (0.19, 0.29, 0.29, 0.19, 0.04)  # of the ZIPs in each bracket; "unknown" ZIPs have no recorded income
_SLOPES = (-0.5, 0.4)  # global slopes of log recency and log frequency
_BRACKET_SD = 0.1
_SLOPE_SD = 0.2  # of a slope, relative to the intercept: log recency is about 5, so both have a similar effect

_WAVES = 18
_FIRST_WAVE = date(2015, 1, 12)
_GAP = (85, 116)  # days between waves
_LAST_ANSWER = 80  # days after the appeal; this is before the next wave

_SMALLEST = 5  # the fewest appeals of a ZIP that the study keeps
_SPREAD = 1.23  # log-normal: mean / median = exp(spread^2 / 2) = 2.1
_TOO_SMALL = 0.02  # share of additional ZIPs with fewer than _SMALLEST appeals
_MOST_APPEALS = 12  # to one donor
_MOVERS = 0.01  # share of donors who move
_ROOMY = 40  # donors leave only ZIPs with this many appeals, so that no ZIP falls below _SMALLEST
_MOST_ZIPS = 90_000  # there are about 99,000 numbers to draw ZIPs from


@dataclass(frozen=True)
class DonorTables:
    """The tables of a charity, and the coefficients that generated them.

    Attributes
    ----------
    appeals : columns ``id, date``
    gifts : columns ``id, date, zip``
    zips : columns ``zip, cluster``, without the ZIPs that have no recorded income
    coefficients : columns ``zip, cluster, intercept, log_recency, log_frequency`` for all ZIPs; ZIPs without a recorded income
        have the cluster "unknown"
    """

    appeals: pl.DataFrame
    gifts: pl.DataFrame
    zips: pl.DataFrame
    coefficients: pl.DataFrame


@dataclass(frozen=True)
class _Donors:
    """Arrays with one entry for each donor; ``last``, ``gifts`` and ``place`` change when the donor gives."""

    appeals: Ints  # number of appeals in all
    enters: Ints  # the first wave that may include the donor
    last: Ints  # day of the last gift
    gifts: Ints  # number of gifts so far
    place: Ints  # ZIP of the last gift
    moves: Ints  # the donor moves before this wave; the number of waves if never
    home: Ints  # ZIP after the move

    def some(self, chosen: Ints) -> _Donors:
        """A copy of some donors."""
        return _Donors(**{name: values[chosen] for name, values in vars(self).items()})


def simulate_donors(
    *,
    zips: int = 29_490,
    appeals: int = 5_000_000,
    success: float = 0.06,
    zip_sd: float = 0.25,
    seed: int | np.random.Generator = 0,
) -> DonorTables:
    """Simulate a charity that mails its donors in 18 waves over five years.

    Every donor has given before the first appeal, and some donors get more appeals than others. The number of appeals per ZIP
    has a log-normal distribution, with at least 5 in each of ``zips`` ZIPs; 2% more ZIPs have fewer. One donor in a hundred
    moves; the next gift shows the new ZIP.

    Parameters
    ----------
    zips : number of ZIPs with at least 5 appeals
    appeals : approximate number of appeals, at least 10 for each ZIP
    success : approximate share of appeals that a gift answers
    zip_sd : standard deviation of the intercepts of the ZIPs in a bracket; that of their slopes is a fifth of it
    seed : a whole number >= 0, or a generator

    Returns
    -------
    DonorTables

    Examples
    --------
    >>> tables = simulate_donors(zips=20, appeals=1000)
    >>> tables.appeals.columns, tables.gifts.columns, tables.zips.columns
    (['id', 'date'], ['id', 'date', 'zip'], ['zip', 'cluster'])
    """
    _check_arguments(zips, appeals, success, zip_sd, seed)
    rng = np.random.default_rng(seed)
    counts = _appeals_by_zip(rng, zips, appeals)
    names = pl.Series("zip", rng.choice(np.arange(501, 99_951), size=len(counts), replace=False)).cast(pl.String).str.zfill(5)
    bracket = rng.choice(len(BRACKETS), size=len(counts), p=_SHARES)
    theta = _coefficients(rng, bracket, zip_sd)
    days = np.cumsum(rng.integers(*_GAP, size=_WAVES)) - _GAP[0]
    donors = _draw_donors(rng, counts, zips, days)
    theta[:, 0] += _calibrate(rng, donors, theta, days, success)
    asked, given = [], [_early_gifts(rng, donors)]
    ids = 1 + rng.permutation(len(donors.appeals))  # otherwise donors of one ZIP would have adjacent ids
    for _, appeals_sent, gifts_received in _mail(rng, donors, theta, days):
        asked.append(appeals_sent)
        given.append(gifts_received)
    place = np.concatenate([places for *_, places in given])
    cluster = pl.Series("cluster", BRACKETS).gather(bracket)
    truth = pl.DataFrame([names, cluster]).hstack(pl.DataFrame(theta, ["intercept", "log_recency", "log_frequency"]))
    recorded = truth.select("zip", "cluster").filter(pl.col("cluster") != "unknown")
    return DonorTables(
        _dated(ids, asked),
        _dated(ids, [(who, day) for who, day, _ in given]).with_columns(names.gather(place)),
        recorded.sort("zip"),
        truth.sort("zip"),
    )


def _check_arguments(zips: int, appeals: int, success: float, zip_sd: float, seed: int | np.random.Generator) -> None:
    def whole(value: object) -> bool:
        return isinstance(value, int | np.integer) and not isinstance(value, bool)

    least = 2 * _SMALLEST * zips if whole(zips) else 0
    for name, value, valid, words in (
        ("zips", zips, whole(zips), "be a whole number"),
        ("appeals", appeals, whole(appeals), "be a whole number"),
        ("zips", zips, 1 <= zips <= _MOST_ZIPS, f"lie between 1 and {_MOST_ZIPS}"),
        ("appeals", appeals, appeals >= least, f"be >= {least}, 10 for each ZIP"),
        ("success", success, 0 < success < 1, "lie between 0 and 1"),
        ("zip_sd", zip_sd, 0 <= zip_sd <= 2, "lie between 0 and 2"),
        ("seed", seed, isinstance(seed, np.random.Generator) or (whole(seed) and seed >= 0), "be a whole number >= 0"),
    ):
        if not valid:
            raise DataError(f"The {name!r} parameter must {words}. Got {value!r} instead.")


def _appeals_by_zip(rng: np.random.Generator, zips: int, appeals: int) -> Ints:
    """Number of appeals of each ZIP: first the ZIPs that the study keeps, then those that are too small."""
    skewed = rng.lognormal(sigma=_SPREAD, size=zips)
    beyond = (appeals - _SMALLEST * zips) * skewed / skewed.sum()
    small = rng.integers(1, _SMALLEST, size=round(_TOO_SMALL * zips))
    return np.concatenate([_SMALLEST + np.rint(beyond).astype(np.int64), small])


def _coefficients(rng: np.random.Generator, bracket: Ints, zip_sd: float) -> Floats:
    """Intercept and slopes of each ZIP, with a global intercept of 0."""
    scale = np.array([1.0, _SLOPE_SD, _SLOPE_SD])
    w = np.array([0.0, *_SLOPES]) + _BRACKET_SD * scale * rng.standard_normal((len(BRACKETS), 3))
    theta: Floats = w[bracket] + zip_sd * scale * rng.standard_normal((len(bracket), 3))
    return theta


def _draw_donors(rng: np.random.Generator, counts: Ints, zips: int, days: Ints) -> _Donors:
    """Draw donors such that each ZIP has its number of appeals."""
    ends = np.cumsum(counts)
    # Put all appeals in a line. Cut it into donors at random places, and also where a ZIP ends.
    lengths = rng.integers(1, _MOST_APPEALS + 1, size=2 * ends[-1] // _MOST_APPEALS + 10 * _MOST_APPEALS)
    cuts = np.cumsum(lengths)
    cuts = np.union1d(cuts[cuts < ends[-1]], ends)
    appeals = np.diff(cuts, prepend=0)
    n = len(appeals)
    place = np.searchsorted(ends, cuts)
    enters = rng.integers(0, _WAVES - appeals + 1)
    last = days[enters] - 1 - rng.exponential(150.0, size=n).astype(np.int64)
    gifts = rng.geometric(0.5, size=n)
    roomy = (counts[place] >= _ROOMY) & (zips > 1)
    moves = np.where(roomy & (rng.random(n) < _MOVERS), rng.integers(0, _WAVES, size=n), _WAVES)
    home = np.where(place < zips, (place + rng.integers(1, max(zips, 2), size=n)) % zips, place)
    return _Donors(appeals, enters, last, gifts, place, moves, home)


def _early_gifts(rng: np.random.Generator, donors: _Donors) -> tuple[Ints, ...]:
    """Donor, day and ZIP of the gifts before the donor's first wave: ``gifts`` of each donor, the latest on ``last``."""
    who = np.repeat(np.arange(len(donors.gifts)), donors.gifts)
    latest = np.cumsum(donors.gifts) - 1
    ago = rng.integers(0, 1500, size=len(who))
    ago[latest] = 0
    order = np.argsort(donors.last[who] - ago, kind="stable")
    who, ago = who[order], ago[order]
    return who, donors.last[who] - ago, donors.place[who]


def _mail(
    rng: np.random.Generator, donors: _Donors, theta: Floats, days: Ints
) -> Iterator[tuple[Floats, tuple[Ints, ...], tuple[Ints, ...]]]:
    """Simulate the waves one after the other; the gifts of a wave change the covariates of the next.

    Each wave gives the probabilities of a gift; donor and day of the appeals; and donor, day and ZIP of the gifts.
    """
    now = replace(donors, last=donors.last.copy(), gifts=donors.gifts.copy(), place=donors.place.copy())
    to_come = donors.appeals.copy()
    answer = loss_of("bernoulli")
    for wave, day in enumerate(days):
        # Selection sampling: all choices of a donor's waves are equally likely.
        chosen = (now.enters <= wave) & (rng.random(len(to_come)) * (len(days) - wave) < to_come)
        mailed = np.flatnonzero(chosen)
        to_come[mailed] -= 1
        a, b, c = theta[now.place[mailed]].T
        margin = a + b * np.log(day - now.last[mailed]) + c * np.log(now.gifts[mailed])
        chance = answer.mean(margin)
        givers = mailed[rng.random(len(mailed)) < chance]
        gift_days = day + np.minimum(2 + rng.geometric(1 / 18, size=len(givers)), _LAST_ANSWER)
        gift_places = np.where(now.moves[givers] <= wave, now.home[givers], now.place[givers])
        now.last[givers] = gift_days
        now.gifts[givers] += 1
        now.place[givers] = gift_places
        yield chance, (mailed, np.full(len(mailed), day)), (givers, gift_days, gift_places)


def _calibrate(rng: np.random.Generator, donors: _Donors, theta: Floats, days: Ints, success: float) -> float:
    """Find the global intercept that gives the share of success, by bisection on some of the donors.

    Each step simulates all waves, because the gifts of a wave change the covariates of the next.
    """
    n = len(donors.appeals)
    some = donors.some(rng.choice(n, size=min(n, 40_000), replace=False))
    low, high = -25.0, 25.0
    for _ in range(18):
        middle = (low + high) / 2
        shifted = theta + np.array([middle, 0.0, 0.0])
        chance = np.concatenate([chance for chance, *_ in _mail(rng, some, shifted, days)])
        low, high = (middle, high) if chance.mean() < success else (low, middle)
    return (low + high) / 2


def _dated(ids: Ints, rows: list[tuple[Ints, ...]]) -> pl.DataFrame:
    """A table of ids and dates; days are counted from the first wave."""
    who, day = (np.concatenate(columns) for columns in zip(*rows, strict=True))
    since: Anything = np.datetime64(_FIRST_WAVE) + day.astype("timedelta64[D]")
    return pl.DataFrame({"id": ids[who], "date": since}).with_columns(pl.col("date").cast(pl.Date))
