"""The register of solvers. Each solver is declared once, in its own file, by the decorator :func:`algorithm`:

    @algorithm(place=3, first_order=True, shared=Control, reference=reference, cost=cost)
    def l2gd(network, penalty, *, eta=None, **options) -> Fit: ...

``solve``, the plan, the races and the command line read these declarations, so a new solver is one new file. The file must be
in ``direct/`` or ``first_order/``. Names are read from the text of the files, so that ``covey --help`` need not import numba.
Therefore ``place`` and ``first_order`` must be literals. A solver is imported when it is used.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from covey.errors import SolverError, listing, nearest, one_of

COMMON = ("start", "tol", "max_iter", "seed", "progress", "james_stein")
"""Parameters of :func:`covey.solvers.solve`. A solver gets those that are in its signature."""

Run = TypeVar("Run", bound=Callable[..., Any])


@dataclass(frozen=True)
class Algorithm:
    """The declaration of a solver.

    Attributes
    ----------
    name : name of its function
    run : ``run(network, penalty, *, ...) -> Fit``; its keyword-only parameters are its options
    place : its place in tables; ``auto`` takes the first direct solver that fits the loss
    first_order : whether it iterates with vectors; the other solvers are direct and exchange matrices
    quadratic : whether it needs a quadratic loss
    shared : a dataclass whose fields are further options
    reference : the algorithm in plain numpy, for tests and readers
    cost : computes its ``Cost`` in a ``Setting`` (:mod:`covey.solvers.costs`); a direct solver is run instead
    variants : options of the variants that a race shows besides the default, by name
    refuses : options of other solvers that no theory allows for this one, each with the reason
    """

    name: str
    run: Callable[..., Any]
    place: int
    first_order: bool = False
    quadratic: bool = False
    shared: type | None = None
    reference: Callable[..., Any] | None = None
    cost: Callable[..., Any] | None = None
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    refuses: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def parameters(self) -> dict[str, Any]:
        """Its keyword parameters with their defaults."""
        taken = inspect.signature(self.run).parameters.values()
        keywords = {part.name: part.default for part in taken if part.kind is part.KEYWORD_ONLY}
        return {**keywords, **{part.name: part.default for part in (fields(self.shared) if self.shared else ())}}

    @property
    def options(self) -> dict[str, Any]:
        """Its parameters that are not parameters of :func:`covey.solvers.solve`."""
        return {name: default for name, default in self.parameters.items() if name not in COMMON}


_registered: dict[str, Algorithm] = {}


def algorithm(**declared: Any) -> Callable[[Run], Run]:
    """Declare a function as a solver; the keywords are fields of :class:`Algorithm`."""

    def register(run: Run) -> Run:
        _registered[run.__name__] = Algorithm(run.__name__, run, **declared)
        return run

    return register


def find(name: str) -> Algorithm:
    """The solver of this name."""
    if name not in _registered and name in _in_files():
        import_module(_in_files()[name]["module"])
    if name not in _registered:
        raise one_of("solver", name, choices())
    return _registered[name]


def load_all() -> None:
    """Import every solver, which registers the messages of all of them in this process."""
    for name in names():
        find(name)


def names() -> tuple[str, ...]:
    """The names of all solvers, in the order of their places."""
    return tuple(sorted(_declarations(), key=lambda name: (_declarations()[name]["place"], name)))


def choices() -> tuple[str, ...]:
    """The values that the parameter ``solver`` may have."""
    return ("auto", *names())


def first_order() -> tuple[str, ...]:
    """The names of the first-order algorithms, which exchange vectors."""
    return tuple(name for name in names() if _declarations()[name].get("first_order", False))


def direct() -> tuple[str, ...]:
    """The names of the direct solvers."""
    return tuple(name for name in names() if name not in first_order())


def check_options(solver: str, options: Mapping[str, Any] | None) -> None:
    """Refuse an unknown solver, and options that the solver does not have."""
    if solver not in choices():
        raise one_of("solver", solver, choices())
    if options is not None and not isinstance(options, Mapping):
        raise SolverError(f"The 'options' parameter must map names to values. Got {options!r} instead.")
    if not options:
        return
    possible = {} if solver == "auto" else find(solver).options
    for name in options:
        if name in COMMON:
            raise SolverError(f"{name!r} is not an option of a solver. Give it as a parameter beside 'options'.")
        if name not in possible:
            raise unknown_option(solver, name)


def unknown_option(solver: str, name: str) -> SolverError:
    """The error for an option that a solver does not have."""
    if solver != "auto" and name in find(solver).refuses:
        return SolverError(f"The solver {solver!r} has no option {name!r}: {find(solver).refuses[name]}")
    options, taken = ((), ()) if solver == "auto" else (sorted(find(solver).options), find(solver).parameters)
    near, takes = nearest(name, taken), f"it takes {listing(options, 20)}." if options else "it takes no options."
    return SolverError(f"The solver {solver!r} has no option {name!r}; {takes if near is None else f'did you mean {near!r}?'}")


def _declarations() -> dict[str, dict[str, Any]]:
    here = {name: {"place": solver.place, "first_order": solver.first_order} for name, solver in _registered.items()}
    return {**_in_files(), **here}


@cache
def _in_files() -> dict[str, dict[str, Any]]:
    """The constants in the declarations in covey's files, and the module of each solver; nothing is imported."""
    declared = {}
    for path in sorted(Path(__file__).parent.glob("*/*.py")):
        text = path.read_text(encoding="utf-8")
        body = ast.parse(text).body if "\n@algorithm(" in text else []
        for function in (part for part in body if isinstance(part, ast.FunctionDef)):
            for call in function.decorator_list:
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "algorithm":
                    values = {str(key.arg): key.value.value for key in call.keywords if isinstance(key.value, ast.Constant)}
                    declared[function.name] = {**values, "module": f"covey.solvers.{path.parent.name}.{path.stem}"}
    return declared
