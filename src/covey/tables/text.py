"""The text of formulas: quoted names, parentheses, summands, and the terms that formulaic reads.

A formula may come from somebody else. It may have at most :data:`MOST_TERMS` terms, which are counted before they are expanded,
so that parsing cannot fill the memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from covey.errors import FormulaError
from covey.tables.expressions import HIGHEST_POWER

MOST_TERMS = 5_000
MOST_TEXT = 100_000
_QUOTED = re.compile(r"`[^`]*`|'[^']*'|\"[^\"]*\"")


def quoted(text: str | None) -> str:
    """The text in quotes for a message, shortened if it is long."""
    return repr(text if text is None or len(text) <= 48 else f"{text[:45]}...")


def masked(text: str) -> str:
    """The text with quoted names overwritten, so that signs in them are not taken for operators."""
    return _QUOTED.sub(lambda name: "_" * len(name[0]), text)


def depths_of(mask: str) -> list[int]:
    """How many parentheses are open after each character."""
    return list(accumulate((char == "(") - (char == ")") for char in mask))


def summands(rhs: str, mask: str) -> Iterator[tuple[str, int, int]]:
    """The sign, the start and the end of each term; '+' and '-' outside parentheses separate terms."""
    depths = depths_of(mask)
    if min(depths) < 0 or depths[-1] > 0:
        raise FormulaError(f"The parentheses of {quoted(rhs)} do not match; close each bar term, as in (1 | g).")
    signs = [match for match in re.finditer(r"[+-](?:\s*[+-])*", mask) if depths[match.start()] == 0]
    ends = [*(match.start() for match in signs), len(rhs)]
    yield "", 0, ends[0]
    for match, end in zip(signs, ends[1:], strict=True):
        yield match[0], match.end(), end


def read_terms(text: str) -> list[list[tuple[str, Any]]]:
    """The terms of a text as formulaic expands it: for each term the expressions of its factors, and how they are evaluated."""
    from formulaic import Formula
    from formulaic.parser import DefaultFormulaParser

    class BoundedParser(DefaultFormulaParser):  # type: ignore[misc]
        """Counts the terms of products and powers before it expands them."""

        def get_terms_from_ast(self, ast: Any, *, context: Any) -> Any:
            if _n_terms(ast) > MOST_TERMS:
                raise too_many(text)
            return super().get_terms_from_ast(ast, context=context)

    if len(text) > MOST_TEXT:
        raise too_many(text)
    if re.search(r"(^|[\s+(*:-])\.($|[\s+)*:-])", text):
        raise FormulaError(f"The formula {text!r} uses '.' for all columns, which is not supported; name the columns.")
    try:
        parsed = Formula(text, _parser=BoundedParser())
        if type(parsed).__name__ != "SimpleFormula":
            raise FormulaError(f"The formula {text!r} has several parts; write one, without '|' or a second '~'.")
        return [[(str(each.expr), each.eval_method.value) for each in term.factors] for term in parsed]
    except FormulaError:
        raise
    except Exception as problem:  # formulaic has no common base class for its parser's errors
        reason = re.sub(r"\x1b\[[0-9;]*m", "", str(problem)).strip().splitlines() or ["it cannot be parsed"]
        raise FormulaError(f"The formula {text!r} cannot be read: {reason[0]}") from None


def too_many(text: str) -> FormulaError:
    """The error for a formula with too many terms."""
    return FormulaError(f"The formula {quoted(text)} has more than {MOST_TERMS:,} terms; write fewer.")


def _n_terms(root: Any) -> int:
    """An upper bound of the number of terms that a syntax tree of formulaic expands to."""
    nodes = [root]
    for node in nodes:
        nodes += getattr(node, "args", ())
    counts: dict[int, int] = {}
    for node in reversed(nodes):  # children before their parents
        below = [counts[id(child)] for child in getattr(node, "args", ())]
        counts[id(node)] = min(_n_terms_of(node, below), 2 * MOST_TERMS)
    return counts[id(root)]


def _n_terms_of(node: Any, below: Sequence[int]) -> int:
    if len(below) < 2:
        return max(below, default=1)
    symbol, (left, right) = node.operator.symbol, below
    if symbol in ("**", "^"):
        digits = str(getattr(node.args[1], "token", ""))
        power = int(digits) if digits.isdecimal() and len(digits) < 4 else 0
        if left == 1 and 1 < power <= HIGHEST_POWER:
            base = getattr(node.args[0], "token", "x")
            equal = f"{base}{symbol}{power} in a formula is a product of terms, so it is {base}"
            raise FormulaError(f"{equal}; write I({base}**{power}) for a power.")
        return int(left**power) if 0 < power <= HIGHEST_POWER else 2 * MOST_TERMS
    return left + right if symbol in ("+", "-", "~", "|") else left * right + left + right
