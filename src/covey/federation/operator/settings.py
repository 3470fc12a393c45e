"""An operator's settings: as a run has them, and as a command line or a Flower run has them, by name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from covey.errors import FederationError, did_you_mean, listing
from covey.federation.operator.members import Members
from covey.federation.privacy.accounting import DELTA, privacy_of
from covey.federation.wire.agreement import Privacy
from covey.federation.wire.checks import check_number
from covey.federation.wire.transport import Transport
from covey.fitting.fit import check_solver
from covey.problem.problem import Problem, Spec, resolve


@dataclass(frozen=True)
class RunSettings:
    """What the operator decides of a run.

    Attributes
    ----------
    timeout : seconds to wait for a reply
    retries : how often a letter is sent again, each time after ``pause`` seconds
    secure : whether sums are masked, so that only totals are seen here
    categories : of columns, where a site may not have others
    members : which clusters and clients each site may contribute
    private, delta : how private the fit is to be, if it is, and with which probability that may fail
    """

    timeout: float = 600.0
    retries: int = 2
    pause: float = 0.0
    secure: bool = False
    categories: Mapping[str, Any] | None = None
    members: Members = field(default_factory=Members)
    private: Privacy | None = None
    delta: float = DELTA


DEFAULTS: dict[str, Any] = {"timeout": RunSettings.timeout, "retries": RunSettings.retries, "pause": 20.0, "wait": 60.0}
"""What holds across machines unless an operator says otherwise, by ``flwr run`` and ``covey federate`` alike: seconds, but for
``retries``; ``pause`` is what a site has to come back before it is asked again, ``wait`` what all have to connect at first.
"""
RUN_OPTIONS = (*DEFAULTS, "sites", "members", "categories", "secure", "epsilon", "delta", "clip", "rounds", "on_loss", "out")
_BOOLEAN = ("secure", "fit_intercept", "standardize", "per_cluster", "tests", "nested", "james_stein")


def awaited(settings: Mapping[str, Any]) -> tuple[tuple[str, ...] | int, float]:
    """Whom a run waits for, by name or by number, and for how many seconds; wrong settings are refused before it does."""
    given, run, draft = named(settings), run_settings_of(settings), resolve(spec_of(settings))
    check_solver(draft.spec)
    check_categories(run.categories, draft)
    return expected_of(given, run.members), float(given.get("wait", DEFAULTS["wait"]))


def named(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by name; what is empty is not set; an unknown name or a value out of range is refused.

    >>> named({"formula": "y ~ x", "on-loss": "continue", "seed": ""})
    {'formula': 'y ~ x', 'on_loss': 'continue'}
    """
    given = {name.replace("-", "_"): value for name, value in settings.items() if not _is_empty(value)}
    known = [*(each.name for each in fields(Spec)), *RUN_OPTIONS]
    for name in given:
        if name not in known:
            raise FederationError(f"There is no setting {name!r} of a run; {did_you_mean(name, known)}")
    for name in _BOOLEAN:
        if not isinstance(given.get(name, False), bool):
            raise FederationError(f"The setting {name!r} must be true or false. Got {given[name]!r} instead.")
    check_number("setting 'timeout', in seconds,", given.get("timeout", DEFAULTS["timeout"]), above=0)
    for name in ("pause", "wait"):
        check_number(f"setting {name!r}, in seconds,", given.get(name, DEFAULTS[name]), least=0)
    check_number("setting 'retries'", given.get("retries", DEFAULTS["retries"]), least=0, whole=True)
    return given


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value)


def spec_of(settings: Mapping[str, Any]) -> Spec:
    """The specification among some settings."""
    known = {each.name for each in fields(Spec)}
    chosen = {name: value for name, value in named(settings).items() if name in known}
    if isinstance(chosen.get("vary"), str):
        chosen["vary"] = [each.strip() for each in chosen["vary"].split(",")]
    return Spec(**chosen)


def run_settings_of(settings: Mapping[str, Any]) -> RunSettings:
    """What the operator decides, among some settings."""
    given = named(settings)
    patience = {name: given.get(name, DEFAULTS[name]) for name in ("timeout", "retries", "pause")}
    private, delta = privacy_of(given, str(given.get("family", "gaussian")))
    return RunSettings(
        **patience,
        secure=given.get("secure", False),
        members=Members.read(given.get("members")),
        categories=categories_of(given),
        private=private,
        delta=delta,
    )


def categories_of(settings: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What columns may hold, by name: as a mapping, or as JSON in words."""
    given = settings.get("categories")
    if not given:
        return None
    try:
        found = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        found = None
    if not (isinstance(found, Mapping) and all(isinstance(each, list | tuple) for each in found.values())):
        raise FederationError(
            f'The \'categories\' must be lists by column, as {{"zone": ["a", "b"]}}. Got {str(given)[:80]!r} instead.'
        )
    return found


def check_categories(categories: Mapping[str, Any] | None, draft: Problem) -> None:
    """Refuse categories of a column that the formula does not name."""
    factors = [] if draft.formula is None else draft.formula.factors
    words = [[each.expression] if each.kind == "lookup" else re.findall(r"[^\W\d]\w*", each.expression) for each in factors]
    columns = [name for found in words for name in found]
    for name in categories or {}:
        if name not in columns:
            raise FederationError(
                f"The 'categories' name a column {name!r} that is not in the formula; {did_you_mean(name, columns)}"
            )


def expected_of(settings: Mapping[str, Any], members: Members) -> tuple[str, ...] | int:
    """Who must take part: sites that are named, else those of the operator's list, else so many; one, if nothing is said."""
    wanted, listed = settings.get("sites"), members.sites
    if isinstance(wanted, str) and not wanted.strip().isdigit():
        return tuple(dict.fromkeys(name for name in map(str.strip, wanted.split(",")) if name))
    try:
        number = None if _is_empty(wanted) else int(str(wanted))
    except ValueError:
        number = 0
    if number is not None and number < 1:
        raise FederationError(f"The setting 'sites' must be how many there are, or their names: a,b,c. Got {wanted!r} instead.")
    if listed and number not in (None, len(listed)):
        raise FederationError(f"The setting 'sites' is {number}, and the list of members has {len(listed)}; leave out 'sites'.")
    return listed or number or 1


def roster_of(transport: Transport, settings: Mapping[str, Any], members: Members) -> tuple[str, ...]:
    """Who takes part: the sites that are expected, all of which must be connected."""
    present, expected = transport.sites(), expected_of(settings, members)
    if isinstance(expected, int):
        if not present:
            raise FederationError("No site is connected; start their nodes first.")
        if len(present) < expected:
            raise FederationError(f"{len(present)} of {expected} sites are connected: {listing(present, 5)}; start the others.")
        return present
    missing = [site for site in expected if site not in present]
    if missing:
        raise FederationError(f"Sites {listing(missing, 5)} are not connected; start their nodes, or leave them off the list.")
    return expected
