"""What a site allows. Everything that its file ``site.toml`` does not allow is refused.

Each rule is declared once, in :class:`Policy`: its value in a simulation, where everything is allowed; its value for a node
whose file does not set it, a careful default; and the comment that ``covey node init`` writes above it. A refusal names
its rule and says how the owner of the site can change it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from covey.errors import CoveyError, FederationError, FormulaError, ModelError, PenaltyError, SolverError, listing
from covey.exact import Exact
from covey.federation.wire.messages import formula_of
from covey.model.files import check_target
from covey.nodes.network import Message
from covey.problem.problem import Problem
from covey.problem.settings import COLUMNS, LEVELS
from covey.records import Record, names
from covey.tables.expressions import FUNCTIONS, read_expression
from covey.tables.formula import Factor
from covey.tables.transforms import OPTIONS

TRANSFORMS = (*FUNCTIONS, "C", *OPTIONS)
ANY = "any"  # in the list of operators
SOLVERS = ("sweep", "newton", "learn", "gradient")
CHOICES = {"replies": ("all", "vectors"), "approve": ("ask", "policy"), "solvers": SOLVERS, "transforms": TRANSFORMS}
_ABOUT_SETTINGS = (FederationError, FormulaError, PenaltyError, SolverError)  # errors that are not about rows
_ABOUT_SCHEMA = ("There is no column", "The table has no rows")  # nor are those that begin so; a path is the site's own matter


def rule(open_: Any, strict: Any, comment: str, least: int = 0) -> Any:
    """A rule: its values in a simulation and for a node whose file does not set it, its comment there, and its least value."""
    return field(default=open_, metadata={"strict": strict, "comment": comment, "least": least})


def refusal(name: str, why: str, change: str) -> FederationError:
    """The error for a request that a rule does not allow.

    >>> str(refusal("columns", "This site does not answer about column 'hiv'", "add it to the list"))
    "This site does not answer about column 'hiv'. The owner of this site can add it to the list: rule 'columns' in site.toml."
    """
    return FederationError(f"{why}. The owner of this site can {change}: rule {name!r} in site.toml.")


@dataclass(frozen=True)
class Policy:
    """What a site allows; None allows everything.

    The comments of the rules, which are also those of ``site.toml``, say what each of them means.
    """

    minimum: int = rule(1, 10, "Least number of clients in each sum that leaves: of each cell, and of each term in it.", 1)
    client: str | None = rule(None, "", "Column with the ids of the clients.")
    columns: Sequence[str] | None = rule(None, (), "Columns that may be responses, terms, weights or offsets.")
    secure: bool = rule(False, True, "Whether only masked sums leave. Then [peers] must name the sites that take part.")
    groups: Sequence[str] | None = rule(None, (), "Columns by which clients may be grouped.")
    transforms: Sequence[str] | None = rule(None, (), f"Functions of one allowed column: {', '.join(TRANSFORMS)}.")
    expressions: Sequence[str] | None = rule(None, (), "Other expressions, each as it stands in a formula.")
    families: Sequence[str] | None = rule(
        None,
        (),
        "Families: gaussian, bernoulli, poisson, gamma. For all but the first see 'Sums are not anonymous' in the docs.",
    )
    solvers: Sequence[str] | None = rule(
        None, (), "Solvers: sweep, newton, learn (penalties by REML or ML), gradient (first-order algorithms)."
    )
    replies: str = rule("all", "vectors", "Which replies leave: all, or vectors (at most one number for each term and cell).")
    share: float = rule(1.0, 0.5, "The largest share that one client may have in the sum of squares of a term, in any cell.")
    approve: str = rule("policy", "ask", "ask: the owner decides on each run (covey site runs). policy: these rules suffice.")
    operators: Sequence[str] | None = rule(
        None, (), 'Public keys of the operators who may ask; "any" is everybody whom the link lets in.'
    )
    pinned: int = rule(
        0, 0, "How many sites of [peers] must take part in a masked run; 0: every other site must be in [peers]."
    )
    runs: int | None = rule(None, 20, "The most runs that this site takes part in.", 1)
    messages: int | None = rule(None, 200, "The most messages that it answers in one start of a run.", 1)
    retention: int | None = rule(
        None, 30, "Days after which the working file of an unfinished run is deleted; hashes of clients and the log stay."
    )
    share_row_errors: bool = False  # whether errors about rows may leave the site; only in a simulation

    def check_problem(self, problem: Problem) -> None:
        """Refuse columns, expressions, families and solvers that are not allowed."""
        spec, (formula, _) = problem.spec, formula_of(problem)
        if self.client is not None and spec.client != self.client:
            given = f"Clients by column {spec.client!r} are not allowed at this site, whose clients are in {self.client!r}"
            raise refusal("client", given, "name another column")
        for factor in formula.factors:
            self._check_factor(factor)
        columns = [name for factor in formula.factors for name in factor.names()[0]]
        columns += [getattr(spec, each) for each in COLUMNS if each not in LEVELS]
        self._check_all("columns", "This site does not answer about column", columns)
        self._check_all("groups", "This site does not group clients by column", [spec.cluster])
        self._check_all("families", "This site does not fit the family", [spec.family])
        if spec.learns is not None and self.solvers is not None and "learn" not in self.solvers:
            why = "This site does not help to learn penalties; give --gamma and --lam"
            raise refusal("solvers", why, "add 'learn' to the list")

    def _check_factor(self, factor: Factor) -> None:
        """Refuse an expression that is neither a function of one column nor listed: it could select single rows."""
        found = factor.read()
        if found is None or self.expressions is None:
            return
        tree, text, function = found.tree, ast.unparse(found.tree), ""
        if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and len(tree.args) == 1 and not tree.keywords:
            function = tree.func.id if isinstance(tree.args[0], ast.Name) else ""
        listed = [ast.unparse(read_expression(each, each).tree) for each in self.expressions]
        if text not in listed and function not in ("I", *(self.transforms or ())):
            why = f"This site does not answer about the expression {factor.expression!r}"
            raise refusal("transforms" if function else "expressions", why, f"add {function or text!r} to the list")

    def _check_all(self, name: str, why: str, asked: Sequence[str | None]) -> None:
        allowed = getattr(self, name)
        for each in asked if allowed is not None else ():
            if each is not None and each not in allowed:
                raise refusal(name, f"{why} {each!r}; it allows {listing(allowed, 8) or 'none'}", "add it to the list")

    def check_message(self, message: Message[Any], exchange: int) -> None:
        """Refuse messages of solvers that are not allowed, and more messages than are allowed."""
        if self.messages is not None and exchange >= self.messages:
            raise refusal("messages", f"This site answers {self.messages} messages in one start of a run", "raise the number")
        for part in message.parts:
            if (solver := solver_of(type(part))) is not None:
                self._check_all("solvers", f"This site does not answer {part.label!r}, a message of", [solver])

    def check_reply(self, reply: Any, cells: int, terms: int) -> None:
        """Refuse a reply with matrices, if only vectors may leave."""
        if self.replies != "all" and any(numbers > cells * terms for numbers in _sizes(reply)):
            raise refusal("replies", "This site sends vectors only, and this message asks for more", "set it to 'all'")

    def public_sentence(self, problem: CoveyError, home: Path | None) -> str:
        """The sentence about an error that may leave the site; one that names clients or values goes to the site's log only."""
        if self.share_row_errors or isinstance(problem, _ABOUT_SETTINGS) or str(problem).startswith(_ABOUT_SCHEMA):
            return str(problem)
        print(f"covey: {problem}", file=sys.stderr)
        if home is not None:
            (home / "refusal.txt").write_text(f"{problem}\n")
        return "Its table cannot be used as it is; the site's own log (refusal.txt in its home) says which column and row."


def solver_of(kind: type[Message[Any]]) -> str | None:
    """The solver to which a kind of message belongs, as the rule ``solvers`` names it; None for messages of all solvers."""
    package, _, module = kind.__module__.removeprefix("covey.").rpartition(".")
    if package in ("nodes", "federation.privacy", "federation.wire"):
        return None
    if package == "solvers.direct":  # of a module that is not known here no message is allowed
        return "sweep" if module in ("sweep", "james_stein") else module.partition("_")[0]
    return {"solvers.first_order": "gradient", "variance": "learn"}.get(package, module)


def _sizes(reply: Any) -> list[int]:
    """The sizes of all arrays of a reply."""
    if isinstance(reply, Exact):
        return [int(reply.size.size)]
    if isinstance(reply, Record | tuple | list):
        parts = [getattr(reply, name) for name in names(reply)] if isinstance(reply, Record) else reply
        return [size for part in parts for size in _sizes(part)]
    return [int(reply.size)] if hasattr(reply, "size") else []


def check_model_folder(folder: Path | None) -> None:
    """Refuse a folder for models that holds other files; the site's log says which."""
    try:
        if folder is not None:
            check_target(folder)
    except ModelError as problem:
        print(f"covey: {problem}", file=sys.stderr)
        raise FederationError("The site's folder for models holds other things or cannot be written; see its log.") from None
