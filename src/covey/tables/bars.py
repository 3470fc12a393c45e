"""Which terms vary by which groups: lme4's bars in a formula, and the ``vary=`` setting.

``y ~ x + (1 + x | state/county)`` says that the intercept and ``x`` differ between states, and between the counties
of each (Bates et al. 2015, Fitting linear mixed-effects models using lme4, section 2.1). covey knows two levels,
clients within clusters; what the idiom can say beyond that is refused in words.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import polars as pl

from covey.errors import DataError, FormulaError, listing
from covey.tables.design import CONTEXT, Formula, check_formula
from covey.tree.ids import as_labels

_QUOTED = re.compile(r"`[^`]*`|'[^']*'|\"[^\"]*\"")
_NAME = r"`[^`]+`|[^\W\d][\w.]*"
_GROUPS = re.compile(rf"({_NAME})(?:\s*([/:])\s*({_NAME})(\s*[/:].*)?)?")
_LEVEL = r"(?:\[(?:(?!\]:).)*\])?"  # the category in a column's name, such as [T.b], up to the next factor


@dataclass(frozen=True)
class Bar:
    """``(terms | group)``, or ``(terms | within:group)``; ``diagonal`` if written with ``||``."""

    terms: str
    group: str
    within: str | None = None
    diagonal: bool = False

    def __str__(self) -> str:
        group = self.group if self.within is None else f"{self.within}:{self.group}"
        return f"({self.terms} {'||' if self.diagonal else '|'} {group})"


@dataclass(frozen=True)
class Grouping:
    """The columns of the two levels; ``nested`` if a client's id has a meaning only within its cluster."""

    client: str | None
    cluster: str | None
    nested: bool = False


@dataclass(frozen=True)
class Vary:
    """The terms that vary at each level, and the kind of covariance (``full``, ``diagonal``) where a formula says it."""

    client: tuple[str, ...]
    cluster: tuple[str, ...]
    client_kind: str | None = None
    cluster_kind: str | None = None


def split_bars(rhs: str) -> tuple[str, tuple[Bar, ...]]:
    """The right-hand side of a formula without its bar terms, and these, each of one level.

    >>> fixed, bars = split_bars("x + (1 + x | state/county)")
    >>> fixed, *map(str, bars)
    ('x', '(1 + x | state)', '(1 + x | state:county)')
    """
    if "|" not in rhs:
        return rhs, ()
    mask = _mask(rhs)
    if "|" not in mask:
        return rhs, ()
    kept, bars = "", []
    for start, sign, end in _pieces(rhs, mask):
        begin = start + len(sign)
        if "|" in mask[begin:end]:
            bars += _read_bar(rhs[begin:end].strip(), sign.strip())
        else:
            kept += rhs[start:end]
    return re.sub(r"^\+\s*(?=\S)", "", kept.strip()) or "1", tuple(bars)


def levels(bars: Sequence[Bar], client: str | None = None, cluster: str | None = None) -> Grouping:
    """Which column is the client and which the cluster; the settings win, and the bars must agree with them.

    >>> levels(split_bars("(1 | state/county)")[1])
    Grouping(client='county', cluster='state', nested=True)
    """
    pairs = {(bar.within, bar.group): None for bar in bars if bar.within is not None}
    alone = {bar.group: None for bar in bars if bar.within is None}
    if len(pairs) > 1:
        shown = " and ".join(_show(f"{outer}:{inner}") for outer, inner in list(pairs)[:2])
        raise FormulaError(f"The bars nest groups in two ways, {shown}; covey knows one cluster column and one client column.")
    for outer, inner in pairs:
        if inner in alone:
            raise FormulaError(f"{_show(inner)} is alone in one bar and within {_show(outer)} in another; write both alike.")
        if client not in (None, inner) or cluster not in (None, outer):
            raise FormulaError(
                f"The bars say that {_show(inner)} lies within {_show(outer)}, but client={_show(client)} and "
                f"cluster={_show(cluster)}; make them agree."
            )
        client, cluster = inner, outer
    if client is None and cluster is None:
        client = next(iter(alone)) if len(alone) == 1 else None
    if not set(alone) <= {client, cluster}:
        raise FormulaError(
            f"The bars name {', '.join(map(_show, list(alone)[:3]))} as groups, with client={_show(client)} and "
            f"cluster={_show(cluster)}; write (1 | cluster/client), or set client= and cluster= to match."
        )
    return Grouping(client, cluster, nested=bool(pairs))


def vary_from_bars(bars: Sequence[Bar], grouping: Grouping, design: Formula) -> Vary:
    """The terms of ``design``, a formula without bars, that the bars let vary at each level; a level without bars has none.

    >>> design = Formula("x", ("Intercept", "x"), ("x",), {})
    >>> vary_from_bars([Bar("x", "county")], Grouping("county", None), design)
    Vary(client=('Intercept', 'x'), cluster=(), client_kind='full', cluster_kind=None)
    """
    client, client_kind = _at_level([bar for bar in bars if bar.group == grouping.client], design)
    cluster, cluster_kind = _at_level([bar for bar in bars if bar.group == grouping.cluster], design)
    return Vary(client, cluster, client_kind, cluster_kind)


def vary_from_setting(vary: Any, terms: Sequence[str]) -> Vary:
    """The ``vary=`` of an estimator: None for all terms, a list for both levels, or a mapping by level.

    >>> vary_from_setting({"cluster": ["1", "zone"]}, ["Intercept", "x", "zone[T.b]", "zone[T.c]"]).cluster
    ('Intercept', 'zone[T.b]', 'zone[T.c]')
    """
    by_level = vary if isinstance(vary, Mapping) else {"client": vary, "cluster": vary}
    odd = [key for key in by_level if key not in ("client", "cluster")]
    if odd:
        raise DataError(f"The 'vary' parameter has the key {odd[0]!r}; its levels are 'client' and 'cluster'.")
    return Vary(_chosen(by_level.get("client"), terms), _chosen(by_level.get("cluster"), terms))


def compose(outer: Any, inner: Any) -> pl.Series:
    """Labels ``inner:outer``, as lme4 writes them, for ids that repeat in several outer groups; missing ids stay missing.

    >>> compose(["MN", "WI", None], [1, 1, 2]).to_list()
    ['1:MN', '1:WI', None]
    """
    ids = _beside(outer, inner).select(pl.all().cast(pl.String))
    both = ids.select(label=pl.col("inner") + ":" + pl.col("outer"))["label"]
    # Only ids that hold a colon themselves can run together: 'a:b' in 'c' and 'a' in 'b:c'.
    if ids.select(pl.all().str.contains(":", literal=True).any()).row(0) == (True, True):
        pairs = ids.with_columns(label=both).drop_nulls().unique()
        twice = pairs.filter(pairs["label"].is_duplicated())
        if len(twice):
            raise DataError(f"Two pairs of ids read {_show(twice['label'][0])}; replace the ':' in the ids of one column.")
    return both


def repeats(outer: Any, inner: Any) -> bool:
    """Whether some inner id occurs in two outer groups.

    >>> repeats(["MN", "MN", "WI"], [1, 2, 1])
    True
    """
    pairs = _beside(outer, inner).drop_nulls().unique()
    return pairs["inner"].n_unique() < len(pairs)


def _mask(text: str) -> str:
    """The text with quoted names blotted out, each character in its place."""
    return _QUOTED.sub(lambda quoted: "_" * len(quoted[0]), text)


def _depths(mask: str) -> list[int]:
    """How many parentheses are open after each character."""
    return list(accumulate((char == "(") - (char == ")") for char in mask))


def _pieces(rhs: str, mask: str) -> list[tuple[int, str, int]]:
    """Start, sign and end of each of the terms that '+' and '-' join at the top."""
    depths = _depths(mask)
    if min(depths) < 0 or depths[-1] > 0:
        raise FormulaError(f"The parentheses of {_show(rhs)} do not match; close each bar term, as in (1 | g).")
    signs = [match for match in re.finditer(r"[+-](?:\s*[+-])*", mask) if depths[match.start()] == 0]
    starts = [0, *(match.start() for match in signs)]
    return list(zip(starts, ["", *(match[0] for match in signs)], [*starts[1:], len(rhs)], strict=True))


def _read_bar(text: str, sign: str) -> list[Bar]:
    mask = _mask(text)
    depths = _depths(mask)
    strokes = list(re.finditer(r"\|+", mask))
    where = {depths[stroke.start()] for stroke in strokes}
    if 0 in where:
        raise FormulaError(f"The bar in {_show(text)} needs parentheses around its terms and its group, as in (1 | g).")
    if mask[0] != "(" or depths.index(0) < len(mask) - 1 or where != {1}:
        raise FormulaError(f"The bar term in {_show(text)} must stand by itself, joined to others by '+', as in x + (1 | g).")
    if sign not in ("", "+"):
        raise FormulaError(f"The bar term {_show(text)} follows {sign!r}; bar terms can only be added, with '+'.")
    if len(strokes) > 1 or len(strokes[0][0]) > 2:
        raise FormulaError(f"The bar term {_show(text)} has more than one bar; write one bar term for each group.")
    stroke = strokes[0]
    terms, groups = text[1 : stroke.start()].strip(), text[stroke.end() : -1].strip()
    if not terms:
        raise FormulaError(f"The bar term {_show(text)} has nothing left of its bar; write 1 for an intercept that varies.")
    if not groups:
        raise FormulaError(f"The bar term {_show(text)} has nothing right of its bar; name the column of the groups.")
    diagonal = len(stroke[0]) == 2
    outer, sep, inner = _read_groups(groups)
    upper, lower = Bar(terms, outer, None, diagonal), Bar(terms, inner, outer, diagonal)
    return {"": [upper], "/": [upper, lower], ":": [lower]}[sep]


def _read_groups(text: str) -> tuple[str, str, str]:
    """``a/b`` into ``("a", "/", "b")``, ``a`` into ``("a", "", "")``."""
    found = _GROUPS.fullmatch(text)
    if found is None:
        raise FormulaError(f"The groups {_show(text)} are not supported; name a column (an odd one in `), or cluster/client.")
    outer, sep, inner, more = (part or "" for part in found.groups())
    if more:
        raise FormulaError(f"The groups {_show(text)} have more than two levels; keep two, as in (1 | cluster/client).")
    if outer.strip("`") == inner.strip("`"):
        raise FormulaError(f"The groups {_show(text)} name one column twice; write (1 | cluster/client) with two columns.")
    return outer.strip("`"), sep, inner.strip("`")


def _at_level(bars: Sequence[Bar], design: Formula) -> tuple[tuple[str, ...], str | None]:
    """The terms that vary by one group, in the design's order, and the kind of their covariance."""
    if not bars:
        return (), None
    group, found = _show(bars[0].group), [_resolve(bar, design) for bar in bars]
    counts = Counter(term for terms in found for term in terms)
    twice = [term for term in design.terms if counts[term] > 1]
    if twice:
        raise FormulaError(f"{_show(twice[0])} varies by {group} in two bars; leave it out of one, with 0 for an intercept.")
    free = all(bar.diagonal or len(terms) <= 1 for bar, terms in zip(bars, found, strict=True))
    if len(bars) > 1 and not free:
        raise FormulaError(f"The bars of {group} correlate some terms only, which is not supported; write one bar, | or ||.")
    return tuple(term for term in design.terms if counts[term]), "diagonal" if free else "full"


def _resolve(bar: Bar, design: Formula) -> list[str]:
    """The columns that a bar's terms make, which must be among those of the terms outside the bars."""
    import pandas as pd
    from formulaic import Formula as Parsed

    check_formula(bar.terms)
    common = {frozenset(factor.expr for factor in term.factors): term for term in Parsed(design.rhs)}
    asked = {frozenset(factor.expr for factor in term.factors): str(term) for term in Parsed(bar.terms)}
    if not asked:
        raise FormulaError(f"The bar term {_show(str(bar))} has no terms; write 1 for an intercept that varies.")
    for lost in (term for factors, term in asked.items() if factors not in common):
        what, more = ("The intercept", ", or 0 to the bar") if lost == "1" else (_show(lost), "")
        raise FormulaError(
            f"{what} varies by {_show(bar.group)} but has no common coefficient; add {lost[:48]} to the terms outside the "
            f"bars{more}."
        )
    # One row is enough to see how formulaic codes the categories when a bar has some of the terms only.
    row = {name: [1.0] for name in design.columns} | {
        name: pd.Categorical(known[:1], categories=known) for name, known in design.levels.items()
    }
    chosen = Parsed([term for factors, term in common.items() if factors in asked])
    with np.errstate(all="ignore"):
        matrix = chosen.get_model_matrix(pd.DataFrame(row, index=[0]), na_action="ignore", context=CONTEXT)
    columns = [str(name) for name in matrix.columns]
    for odd in (name for name in columns if name not in design.terms):
        raise FormulaError(
            f"The bar term {_show(str(bar))} asks for {_show(odd)}, but the terms outside the bars code its categories "
            "otherwise; write the bar's terms as they stand there, the intercept included."
        )
    return columns


def _chosen(names: Any, terms: Sequence[str]) -> tuple[str, ...]:
    """The terms that one level of ``vary=`` names, in their own order."""
    if names is None:
        return tuple(terms)
    if not isinstance(names, Iterable):
        raise DataError(f"The 'vary' parameter must be a list of terms, or of such by level. Got {names!r} instead.")
    chosen: set[str] = set()
    for given in [names] if isinstance(names, str) else names:
        name = "Intercept" if str(given) == "1" else str(given)
        columns = re.compile(":".join(re.escape(factor) + _LEVEL for factor in name.split(":")), re.DOTALL)
        found = {name} & set(terms) or {term for term in terms if columns.fullmatch(term)}
        if not found:
            raise DataError(f"The 'vary' parameter names {_show(name)}, which is not a term; known are {listing(terms)}.")
        chosen |= found
    return tuple(term for term in terms if term in chosen)


def _beside(outer: Any, inner: Any) -> pl.DataFrame:
    ids = {"outer": as_labels(outer, "cluster"), "inner": as_labels(inner, "client")}
    if len(ids["outer"]) != len(ids["inner"]):
        raise DataError(f"There are {len(ids['outer'])} cluster ids for {len(ids['inner'])} client ids; give each row both.")
    return pl.DataFrame(ids)


def _show(text: str | None) -> str:
    """Quoted, and cut so that a long formula does not bury the sentence around it."""
    return repr(text if text is None or len(text) <= 48 else f"{text[:45]}...")
