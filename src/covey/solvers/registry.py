"""The solvers covey has. Each is declared once, in its own file, by the decorator :func:`algorithm`.

    @algorithm(place=3, first_order=True, shared=Control, reference=reference, cost=cost)
    def l2gd(network, penalty, *, eta=None, **watch) -> Fit: ...

Whatever needs to know solvers (``solve``, options, the plan, races, the command line) reads these declarations. The names are
read from the text of the files, so that ``covey --help`` need not wait for numba; a solver is imported when it is used.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from covey.errors import SolverError, listing, nearest, one_of

COMMON = ("start", "tol", "max_iter", "seed", "progress", "james_stein")
"""Parameters of :func:`covey.solvers.solve`; a solver gets those that its signature has."""

Run = TypeVar("Run", bound=Callable[..., Any])


@dataclass(frozen=True)
class Algorithm:
    """A solver as it declares itself.

    Attributes
    ----------
    name : that of its function
    run : ``run(network, penalty, *, ...) -> Fit``; what it takes by keyword only are its options
    place : where it stands in tables; ``auto`` takes the first that fits
    first_order : whether it takes gradient steps and exchanges vectors only; the others are direct, and exchange matrices
    quadratic : whether it needs a quadratic loss
    shared : a dataclass whose fields are further options
    reference : the algorithm written out, for tests and readers
    cost : its ``Cost`` in a ``Setting`` (:mod:`covey.solvers.costs`); that of a direct solver is counted in a trial
    variants : options of the variants that a race shows besides the plain one, by name
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

    @property
    def parameters(self) -> dict[str, Any]:
        """What it takes by keyword, with the defaults."""
        own = inspect.signature(self.run).parameters.values()
        taken = {each.name: each.default for each in own if each.kind is each.KEYWORD_ONLY}
        for each in fields(self.shared) if self.shared is not None else ():
            taken[each.name] = None if each.default is MISSING else each.default
        return taken

    @property
    def options(self) -> dict[str, Any]:
        """Those of them that are its own."""
        return {name: default for name, default in self.parameters.items() if name not in COMMON}


_registered: dict[str, Algorithm] = {}


def algorithm(**declared: Any) -> Callable[[Run], Run]:
    """Declare a function to be a solver; the keywords are fields of :class:`Algorithm`."""

    def register(run: Run) -> Run:
        _registered[run.__name__] = Algorithm(run.__name__, run, **declared)
        return run

    return register


def find(name: str) -> Algorithm:
    """A solver by its name."""
    if name not in _registered and name in _in_files():
        import_module(_in_files()[name]["module"])
    if name not in _registered:
        raise one_of("solver", name, choices())
    return _registered[name]


def load_all() -> None:
    """Import every solver, so that a process that only answers messages knows those of all of them."""
    for name in names():
        find(name)


def names() -> tuple[str, ...]:
    """All solvers, in their order."""
    return tuple(sorted(_declarations(), key=lambda name: (_declarations()[name]["place"], name)))


def choices() -> tuple[str, ...]:
    """What the parameter ``solver`` may be."""
    return ("auto", *names())


def first_order() -> tuple[str, ...]:
    """The solvers that take gradient steps and exchange vectors only."""
    return tuple(name for name in names() if _declarations()[name].get("first_order", False))


def direct() -> tuple[str, ...]:
    """The solvers that go straight to the minimiser."""
    return tuple(name for name in names() if name not in first_order())


def check_options(solver: str, options: Mapping[str, Any] | None) -> None:
    """Refuse a solver that does not exist, and options that it does not have."""
    if solver not in choices():
        raise one_of("solver", solver, choices())
    if options is not None and not isinstance(options, Mapping):
        raise SolverError(f"The 'options' parameter must map names to values. Got {options!r} instead.")
    if not options:
        return
    known = {} if solver == "auto" else find(solver).options
    for name in options:
        if name in COMMON:
            raise SolverError(f"{name!r} is not an option of a solver but a parameter beside 'options'; give it there.")
        if name not in known:
            raise unknown_option(solver, name)


def unknown_option(solver: str, name: str) -> SolverError:
    """The error for an option that a solver does not have."""
    known, taken = ((), ()) if solver == "auto" else (sorted(find(solver).options), find(solver).parameters)
    near, takes = nearest(name, taken), f"it takes {listing(known, 20)}." if known else "it takes no options."
    return SolverError(f"The solver {solver!r} has no option {name!r}; {takes if near is None else f'did you mean {near!r}?'}")


def _declarations() -> dict[str, dict[str, Any]]:
    here = {each.name: {"place": each.place, "first_order": each.first_order} for each in _registered.values()}
    return {**_in_files(), **here}


@cache
def _in_files() -> dict[str, dict[str, Any]]:
    """The constants in the declarations of covey's own files, and the module of each; nothing is imported."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("*/*.py")):
        text = path.read_text(encoding="utf-8")
        body = ast.parse(text).body if "\n@algorithm(" in text else []
        for function in (each for each in body if isinstance(each, ast.FunctionDef)):
            for call in function.decorator_list:
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "algorithm":
                    said = {str(each.arg): each.value.value for each in call.keywords if isinstance(each.value, ast.Constant)}
                    found[function.name] = {**said, "module": f"covey.solvers.{path.parent.name}.{path.stem}"}
    return found
