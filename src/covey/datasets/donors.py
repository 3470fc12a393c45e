"""A simulated charity: its appeals, gifts and ZIPs, of any size, with the law behind them known.

Appeals go out in waves. The answer to each is drawn from a logistic model on what the charity knows of the donor on that day,
the covariates that :mod:`covey.reproduce.solicitations` computes from the tables:

    logit P(gift) = a + b log(days since the last gift) + c log(gifts so far)

with (a, b, c) of the ZIP of the last gift, which scatter around those of its income bracket, and these around global ones.
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

_SHARES = (0.19, 0.29, 0.29, 0.19, 0.04)  # of the ZIPs; "unknown" are those with no recorded income
_SLOPES = (-0.5, 0.4)  # global, of log recency and log frequency
_BRACKET_SD = 0.1
_SLOPE_SD = 0.2  # of a slope, relative to that of the intercept: log recency is about 5, so both then matter alike

_WAVES = 18
_FIRST_WAVE = date(2015, 1, 12)
_GAP = (85, 116)  # days between waves
_LAST_ANSWER = 80  # days after the appeal, so before the next wave

_SMALLEST = 5  # appeals of the smallest ZIP that counts
_SPREAD = 1.23  # log-normal: mean / median = exp(spread^2 / 2) = 2.1
_TOO_SMALL = 0.02  # further ZIPs with fewer than _SMALLEST appeals
_MOST_APPEALS = 12  # to a donor
_MOVERS = 0.01
_ROOMY = 40  # appeals of a ZIP that donors may leave, so that none falls below _SMALLEST
_MOST_ZIPS = 90_000  # of five digits, with room to draw


@dataclass(frozen=True)
class DonorTables:
    """The tables a charity has, and the truth behind them.

    ``appeals (id, date)``, ``gifts (id, date, zip)`` and ``zips (zip, cluster)``, in which ZIPs with no recorded income do not
    occur; ``coefficients (zip, cluster, intercept, log_recency, log_frequency)`` of all ZIPs, their cluster "unknown".
    """

    appeals: pl.DataFrame
    gifts: pl.DataFrame
    zips: pl.DataFrame
    coefficients: pl.DataFrame


@dataclass(frozen=True)
class _Donors:
    """One entry for each donor; ``last``, ``gifts`` and ``place`` move on as gifts come in."""

    appeals: Ints  # how many he gets in all
    enters: Ints  # the first wave that may go to him
    last: Ints  # day of the last gift
    gifts: Ints  # number of gifts so far
    place: Ints  # ZIP of the last gift
    moves: Ints  # the wave before which he moves, if ever
    home: Ints  # ZIP after the move

    def some(self, chosen: Ints) -> _Donors:
        """A copy of some of them."""
        columns = {name: values[chosen] for name, values in vars(self).items()}
        return _Donors(**columns)


@dataclass(frozen=True)
class _Wave:
    """The donors mailed on a day, the chance of each to give, and the gifts that came in."""

    day: int
    mailed: Ints
    chance: Floats
    givers: Ints
    gift_days: Ints
    gift_places: Ints


def simulate_donors(
    *,
    zips: int = 29_490,
    appeals: int = 5_000_000,
    success: float = 0.06,
    zip_sd: float = 0.25,
    seed: int | np.random.Generator = 0,
) -> DonorTables:
    """Draw the tables of a charity that mails its donors in 18 waves over five years.

    Every donor has given before his first appeal and some are mailed more often than others. The number of appeals of a ZIP
    is skewed like a log-normal, at least 5 in each of ``zips`` ZIPs; 2% more ZIPs have fewer. A donor in a hundred moves,
    which the charity learns from his next gift.

    Parameters
    ----------
    zips : ZIPs with at least 5 appeals
    appeals : about how many in all, at least 10 for each ZIP
    success : about the share of appeals that a gift answers
    zip_sd : standard deviation between the intercepts of the ZIPs of a bracket; a fifth of it between their slopes

    >>> tables = simulate_donors(zips=20, appeals=1000)
    >>> tables.appeals.columns, tables.gifts.columns, tables.zips.columns
    (['id', 'date'], ['id', 'date', 'zip'], ['zip', 'cluster'])
    """
    _refuse_bad_arguments(zips, appeals, success, zip_sd)
    if not isinstance(seed, np.random.Generator) and not (isinstance(seed, int | np.integer) and seed >= 0):
        raise DataError(f"The 'seed' parameter must be a whole number >= 0. Got {seed!r} instead.")
    rng = np.random.default_rng(seed)
    counts = _appeals_by_zip(rng, zips, appeals)
    names = pl.Series("zip", rng.choice(np.arange(501, 99_951), size=len(counts), replace=False)).cast(pl.String).str.zfill(5)
    bracket = rng.choice(len(BRACKETS), size=len(counts), p=_SHARES)
    theta = _coefficients(rng, bracket, zip_sd)
    days = np.cumsum(rng.integers(*_GAP, size=_WAVES)) - _GAP[0]
    donors = _draw_donors(rng, counts, zips, days)
    theta[:, 0] += _calibrate(rng, donors, theta, days, success)
    early = _early_gifts(rng, donors)
    asked, given = [], [early]
    ids = 1 + rng.permutation(len(donors.appeals))  # else neighbours would have neighbouring ids
    for wave in _mail(rng, donors, theta, days):
        asked.append((wave.mailed, np.full(len(wave.mailed), wave.day)))
        given.append((wave.givers, wave.gift_days, wave.gift_places))
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


def _refuse_bad_arguments(zips: int, appeals: int, success: float, zip_sd: float) -> None:
    for name, value in (("zips", zips), ("appeals", appeals)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise DataError(f"The {name!r} parameter must be a whole number. Got {value!r} instead.")
    if not 1 <= zips <= _MOST_ZIPS:
        raise DataError(f"The 'zips' parameter must lie between 1 and {_MOST_ZIPS}. Got {zips} instead.")
    if appeals < 2 * _SMALLEST * zips:
        raise DataError(f"The 'appeals' parameter must be >= {2 * _SMALLEST * zips}, 10 for each ZIP. Got {appeals} instead.")
    if not 0 < success < 1:
        raise DataError(f"The 'success' parameter must lie between 0 and 1. Got {success!r} instead.")
    if not 0 <= zip_sd <= 2:
        raise DataError(f"The 'zip_sd' parameter must lie between 0 and 2. Got {zip_sd!r} instead.")


def _appeals_by_zip(rng: np.random.Generator, zips: int, appeals: int) -> Ints:
    """Appeals of each ZIP: first the ZIPs that count, then those too small."""
    skewed = rng.lognormal(sigma=_SPREAD, size=zips)
    beyond = (appeals - _SMALLEST * zips) * skewed / skewed.sum()
    small = rng.integers(1, _SMALLEST, size=round(_TOO_SMALL * zips))
    return np.concatenate([_SMALLEST + np.rint(beyond).astype(np.int64), small])


def _coefficients(rng: np.random.Generator, bracket: Ints, zip_sd: float) -> Floats:
    """Intercept and slopes of each ZIP, the global intercept left at 0."""
    scale = np.array([1.0, _SLOPE_SD, _SLOPE_SD])
    w = np.array([0.0, *_SLOPES]) + _BRACKET_SD * scale * rng.standard_normal((len(BRACKETS), 3))
    theta: Floats = w[bracket] + zip_sd * scale * rng.standard_normal((len(bracket), 3))
    return theta


def _draw_donors(rng: np.random.Generator, counts: Ints, zips: int, days: Ints) -> _Donors:
    """Donors enough for each ZIP to get its number of appeals."""
    ends = np.cumsum(counts)
    # All appeals in a line, cut into donors at random and again where a ZIP ends.
    lengths = rng.integers(1, _MOST_APPEALS + 1, size=2 * ends[-1] // _MOST_APPEALS + 10 * _MOST_APPEALS)
    cuts = np.cumsum(lengths)
    cuts = np.union1d(cuts[cuts < ends[-1]], ends)
    own = np.diff(cuts, prepend=0)
    n = len(own)
    place = np.searchsorted(ends, cuts)
    enters = rng.integers(0, _WAVES - own + 1)
    last = days[enters] - 1 - rng.exponential(150.0, size=n).astype(np.int64)
    gifts = rng.geometric(0.5, size=n)
    roomy = (counts[place] >= _ROOMY) & (zips > 1)
    moves = np.where(roomy & (rng.random(n) < _MOVERS), rng.integers(0, _WAVES, size=n), _WAVES)
    home = np.where(place < zips, (place + rng.integers(1, max(zips, 2), size=n)) % zips, place)
    return _Donors(own, enters, last, gifts, place, moves, home)


def _early_gifts(rng: np.random.Generator, donors: _Donors) -> tuple[Ints, Ints, Ints]:
    """Who gave when and from where before the first wave that may reach him: ``gifts`` of them, the latest on ``last``."""
    who = np.repeat(np.arange(len(donors.gifts)), donors.gifts)
    latest = np.cumsum(donors.gifts) - 1
    ago = rng.integers(0, 1500, size=len(who))
    ago[latest] = 0
    order = np.argsort(donors.last[who] - ago, kind="stable")
    who, ago = who[order], ago[order]
    return who, donors.last[who] - ago, donors.place[who]


def _mail(rng: np.random.Generator, donors: _Donors, theta: Floats, days: Ints) -> Iterator[_Wave]:
    """The waves one after the other; each knows the gifts before it."""
    now = replace(donors, last=donors.last.copy(), gifts=donors.gifts.copy(), place=donors.place.copy())
    to_come = donors.appeals.copy()
    answer = loss_of("bernoulli")
    for wave, day in enumerate(days):
        # Selection sampling: every choice of a donor's appeals among his waves is equally likely.
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
        yield _Wave(int(day), mailed, chance, givers, gift_days, gift_places)


def _calibrate(rng: np.random.Generator, donors: _Donors, theta: Floats, days: Ints, success: float) -> float:
    """The global intercept that gives the share of success, by bisection on some of the donors.

    A run of the waves for each guess, since the gifts of one wave change the covariates of the next.
    """
    n = len(donors.appeals)
    some = donors.some(rng.choice(n, size=min(n, 40_000), replace=False))
    low, high = -25.0, 25.0
    for _ in range(18):
        middle = (low + high) / 2
        shifted = theta + np.array([middle, 0.0, 0.0])
        chance = np.concatenate([wave.chance for wave in _mail(rng, some, shifted, days)])
        low, high = (middle, high) if chance.mean() < success else (low, middle)
    return (low + high) / 2


def _dated(ids: Ints, rows: list[tuple[Ints, Ints]]) -> pl.DataFrame:
    """A table of ids and dates from donors and days after the first wave."""
    who, day = (np.concatenate(columns) for columns in zip(*rows, strict=True))
    since: Anything = np.datetime64(_FIRST_WAVE) + day.astype("timedelta64[D]")
    return pl.DataFrame({"id": ids[who], "date": since}).with_columns(pl.col("date").cast(pl.Date))
