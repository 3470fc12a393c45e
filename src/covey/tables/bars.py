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
from typing import Any

import polars as pl

from covey.errors import DataError, FormulaError, listing
from covey.tables.design import Formula
from covey.tables.formula import Bar, Terms, show
from covey.tree.hierarchy import as_labels

_LEVEL = r"(?:\[(?:(?!\]:).)*\])?"  # the category in a column's name, such as [T.b], up to the next factor


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


def levels(bars: Sequence[Bar], client: str | None = None, cluster: str | None = None) -> Grouping:
    """Which column is the client and which the cluster; the settings win, and the bars must agree with them.

    >>> from covey.tables.formula import parse_formula
    >>> levels(parse_formula("y ~ (1 | state/county)").bars)
    Grouping(client='county', cluster='state', nested=True)
    """
    pairs = {(bar.within, bar.group): None for bar in bars if bar.within is not None}
    alone = {bar.group: None for bar in bars if bar.within is None}
    if len(pairs) > 1:
        shown = " and ".join(show(f"{outer}:{inner}") for outer, inner in list(pairs)[:2])
        raise FormulaError(f"The bars nest groups in two ways, {shown}; covey knows one cluster column and one client column.")
    for outer, inner in pairs:
        if inner in alone:
            raise FormulaError(f"{show(inner)} is alone in one bar and within {show(outer)} in another; write both alike.")
        if client not in (None, inner) or cluster not in (None, outer):
            raise FormulaError(
                f"The bars say that {show(inner)} lies within {show(outer)}, but client={show(client)} and "
                f"cluster={show(cluster)}; make them agree."
            )
        client, cluster = inner, outer
    if client is None and cluster is None:
        client = next(iter(alone)) if len(alone) == 1 else None
    if not set(alone) <= {client, cluster}:
        raise FormulaError(
            f"The bars name {', '.join(map(show, list(alone)[:3]))} as groups, with client={show(client)} and "
            f"cluster={show(cluster)}; write (1 | cluster/client), or set client= and cluster= to match."
        )
    return Grouping(client, cluster, nested=bool(pairs))


def vary_from_bars(bars: Sequence[Bar], grouping: Grouping, design: Formula) -> Vary:
    """The terms of ``design``, a formula without bars, that the bars let vary at each level; a level without bars has none.

    >>> from covey.tables.formula import parse_formula
    >>> formula = parse_formula("y ~ x + (x | county)")
    >>> vary_from_bars(formula.bars, Grouping("county", None), Formula.of(formula.common, ["x"], {}))
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
            raise DataError(f"Two pairs of ids read {show(twice['label'][0])}; replace the ':' in the ids of one column.")
    return both


def repeats(outer: Any, inner: Any) -> bool:
    """Whether some inner id occurs in two outer groups.

    >>> repeats(["MN", "MN", "WI"], [1, 2, 1])
    True
    """
    pairs = _beside(outer, inner).drop_nulls().unique()
    return pairs["inner"].n_unique() < len(pairs)


def _at_level(bars: Sequence[Bar], design: Formula) -> tuple[tuple[str, ...], str | None]:
    """The terms that vary by one group, in the design's order, and the kind of their covariance."""
    if not bars:
        return (), None
    group, found = show(bars[0].group), [_resolve(bar, design) for bar in bars]
    counts = Counter(term for terms in found for term in terms)
    twice = [term for term in design.terms if counts[term] > 1]
    if twice:
        raise FormulaError(f"{show(twice[0])} varies by {group} in two bars; leave it out of one, with 0 for an intercept.")
    free = all(bar.diagonal or len(terms) <= 1 for bar, terms in zip(bars, found, strict=True))
    if len(bars) > 1 and not free:
        raise FormulaError(f"The bars of {group} correlate some terms only, which is not supported; write one bar, | or ||.")
    return tuple(term for term in design.terms if counts[term]), "diagonal" if free else "full"


def _resolve(bar: Bar, design: Formula) -> list[str]:
    """The columns that a bar's terms make, which must be among those of the terms outside the bars."""
    common, asked = design.rhs.by_factors(), bar.terms.by_factors()
    if not asked:
        raise FormulaError(f"The bar term {show(str(bar))} has no terms; write 1 for an intercept that varies.")
    for factors, term in asked.items():
        if factors not in common:
            lost = ":".join(factor.expression for factor in term)
            what, more = ("The intercept", ", or 0 to the bar") if lost == "1" else (show(lost), "")
            raise FormulaError(
                f"{what} varies by {show(bar.group)} but has no common coefficient; add {lost[:48]} to the terms outside the "
                f"bars{more}."
            )
    # How formulaic codes the categories when a bar has some of the terms only.
    chosen = Terms(bar.terms.text, tuple(term for factors, term in common.items() if factors in asked))
    columns = design.columns_of(chosen)
    for odd in (name for name in columns if name not in design.terms):
        raise FormulaError(
            f"The bar term {show(str(bar))} asks for {show(odd)}, but the terms outside the bars code its categories "
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
            raise DataError(f"The 'vary' parameter names {show(name)}, which is not a term; known are {listing(terms)}.")
        chosen |= found
    return tuple(term for term in terms if term in chosen)


def _beside(outer: Any, inner: Any) -> pl.DataFrame:
    ids = {"outer": as_labels(outer, "cluster"), "inner": as_labels(inner, "client")}
    if len(ids["outer"]) != len(ids["inner"]):
        raise DataError(f"There are {len(ids['outer'])} cluster ids for {len(ids['inner'])} client ids; give each row both.")
    return pl.DataFrame(ids)
