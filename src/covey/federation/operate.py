"""A whole federated fit, as an operator starts it: settings in, models at the sites and at the operator's, a report out."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from covey import __version__
from covey.design import check_formula, design_from_json, split_formula
from covey.errors import CoveyError, FederationError, ModelError, listing, one_of
from covey.federation.agreement import Deliver
from covey.federation.coordinator import Exchange, Federation, Halted, SiteLost, Terms, new_run
from covey.federation.journal import ForeignJournal, Journal
from covey.federation.members import Members
from covey.federation.models import operator_model
from covey.federation.privacy import check_spec, fit_privately, privacy_of, promised, statement
from covey.federation.report import report
from covey.federation.transport import Transport
from covey.grouping import split_bars
from covey.learning import Fitted, check_across, fit_across
from covey.model import Model
from covey.persist import check_target, learned_to_json, save_model, spec_to_json
from covey.spec import Spec

OnLoss = Literal["stop", "continue"]
ON_LOSS = ("stop", "continue")


@dataclass(frozen=True)
class Outcome:
    """What a run came to.

    Attributes
    ----------
    model : clusters and the whole; the clients' models are at their sites
    exchanges : each, with its cost
    roster : who took part to the end
    without : sites that were lost, and why
    missed : sites that took part and were lost before they could be told the models of clusters, and why
    run : its name, by which sites remember it
    privacy : what it promises: epsilon, delta, and how; None without differential privacy
    """

    model: Model
    exchanges: tuple[Exchange, ...]
    roster: tuple[str, ...]
    without: Mapping[str, str]
    missed: Mapping[str, str]
    run: str
    privacy: Mapping[str, Any] | None = None


def run_fit(
    transport: Transport,
    roster: Sequence[str],
    spec: Spec,
    terms: Terms,
    *,
    journal: Path | None = None,
    out: Path | None = None,
    on_loss: OnLoss = "stop",
    say: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Fit a specification across the sites of a roster.

    Parameters
    ----------
    journal : file to write exchanges to; if it holds those of the same run, killed, that run goes on to the same bits
    out : folder for the models of clusters and of the whole, written before the journal is given up
    on_loss : what to do when a site is lost: "stop", to go on later from the journal, or "continue" without it, from the start
    say : told what is being done, for a live line
    """
    spec.check()
    check_across(spec)
    if terms.secure and terms.members.clients:
        raise FederationError(
            "Under masks the coordinator cannot check clients' ids against its list; leave the column client out of it, or "
            "leave out --secure."
        )
    if on_loss not in ON_LOSS:
        raise one_of("on_loss", on_loss, ON_LOSS)
    if terms.private is not None:
        check_spec(spec)
    about = {
        "covey": __version__,
        "spec": spec_to_json(spec),
        "roster": tuple(sorted(roster)),
        "secure": terms.secure,
        "private": terms.private,
    }
    book = Journal(journal, about, new_run())
    federation = Federation(transport, roster, spec, book, terms, say)
    without: dict[str, str] = {}
    try:
        fitted = _fit_with_whom_it_can(federation, spec, on_loss, without)
        said = {
            "run": federation.journal.head["run"],
            "sites": list(federation.roster),
            "without": without,
            "privacy": _stated(federation),
        }
        model = operator_model(federation, fitted)
        if out is not None:
            save_model(model, out, extra={"federation": said})
        missed = _deliver(federation, _delivered(fitted, said), on_loss)
    except SiteLost as lost:
        raise FederationError(f"{str(lost).rstrip('.')}; the run has stopped.{_kept(book)}") from None
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"Interrupted; the run has stopped.{_kept(book)}") from None
    except BaseException as problem:
        book.close(done=_is_of_no_use(book, problem))
        raise
    book.close(done=True)
    exchanges = tuple(federation.exchanges)
    return Outcome(model, exchanges, federation.roster, without, missed, said["run"], said["privacy"])


def _fit_with_whom_it_can(federation: Federation, spec: Spec, on_loss: OnLoss, without: dict[str, str]) -> Fitted:
    """Fit; with ``on_loss="continue"`` anew without the sites that are lost, which go into ``without``."""
    while True:
        try:
            return _fit(federation, spec)
        except SiteLost as lost:
            if on_loss == "stop" and not lost.known:
                raise
            federation.leave_out(lost)
            without |= lost.sites
            if not federation.roster:
                raise Halted(f"No site is left: {lost}") from None


def _deliver(federation: Federation, body: Deliver, on_loss: OnLoss) -> dict[str, str]:
    """Tell the sites; those that could not be told, if the run is to go on without them: their clients are in the fit."""
    try:
        federation.deliver(body)
    except SiteLost as lost:
        if on_loss == "stop":
            raise
        return lost.sites
    return {}


def _is_of_no_use(book: Journal, problem: BaseException) -> bool:
    """Whether a journal is only in the way: the fit has not begun, or the same exchanges would end in the same mistake."""
    if not isinstance(problem, CoveyError) or isinstance(problem, ForeignJournal | ModelError):
        return False
    return not book.begun or not isinstance(problem, Halted)


def _fit(federation: Federation, spec: Spec) -> Fitted:
    federation.open()
    settled = spec.settled()
    stated = _stated(federation)
    if federation.how.private is not None and stated is not None:
        return promised(fit_privately(federation, settled, federation.how.private), stated)
    return fit_across(federation, settled, settled.varying(design_from_json(federation.agreed.design)))


def _stated(federation: Federation) -> dict[str, Any] | None:
    """What a private fit promises, over all its starts."""
    private, delta = federation.how.private, federation.how.delta
    return None if private is None else statement(private, delta, federation.epoch + 1)


def _kept(book: Journal) -> str:
    """Close the journal of a run that is to go on, and say what is in it; before the fit has begun there is nothing to keep."""
    book.close(done=not book.begun)
    kept = f" {len(book.entries)} exchanges are kept in {str(book.path)!r}: run the same again."
    return kept if book.begun and book.path is not None else ""


def _delivered(fitted: Fitted, said: Mapping[str, Any]) -> Deliver:
    fit, penalty = fitted.fit, fitted.penalty
    learned = None if fitted.learned is None else learned_to_json(fitted.learned)
    lam = None if penalty is None else penalty.lam
    return Deliver(fit.w, fit.wbar, lam, asdict(fit.convergence), learned, dict(said))


DEFAULTS: dict[str, Any] = {"timeout": Terms.timeout, "retries": Terms.retries, "pause": 20.0, "wait": 60.0}
"""What holds across machines unless an operator says otherwise, by ``flwr run`` and ``covey federate`` alike: seconds, but for
``retries``; ``pause`` is what a site has to come back before it is asked again, ``wait`` what all have to connect at first.
"""
_OWN = (*DEFAULTS, "sites", "members", "categories", "secure", "epsilon", "delta", "clip", "rounds", "on_loss", "out")
_BOOLEAN = ("secure", "fit_intercept", "standardize", "per_cluster", "tests", "nested", "james_stein")


def operate(transport: Transport, settings: Mapping[str, Any], say: Callable[[str], None]) -> str:
    """Run a fit from plain settings, as a command line or a Flower run has them; the text to print at its end."""
    given, spec, terms = named(settings), spec_of(settings), terms_of(settings)
    out = Path(str(given["out"])) if "out" in given else None
    if out is not None:
        check_target(out)
    roster = roster_of(transport, given, terms.members)
    journal = None if out is None else out.with_name(f"{out.name}.journal")
    on_loss = given.get("on_loss", "stop")
    outcome = run_fit(transport, roster, spec, terms, journal=journal, out=out, on_loss=on_loss, say=say)
    text = report(outcome)
    return text if out is None else f"{text}\n\nmodel of clusters and of the whole written to {out}"


def awaited(settings: Mapping[str, Any]) -> tuple[tuple[str, ...] | int, float]:
    """Whom a run waits for, by name or by number, and for how many seconds; wrong settings are refused before it does."""
    given, _, terms = named(settings), spec_of(settings), terms_of(settings)
    return expected_of(given, terms.members), float(given.get("wait", DEFAULTS["wait"]))


def named(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by name; what is empty is not set, and what is misspelt or no value for its name is refused.

    >>> named({"formula": "y ~ x", "on-loss": "continue", "seed": ""})
    {'formula': 'y ~ x', 'on_loss': 'continue'}
    """
    given = {name.replace("-", "_"): value for name, value in settings.items() if not _is_empty(value)}
    known = [*(each.name for each in fields(Spec)), *_OWN]
    for name in given:
        if name not in known:
            raise FederationError(f"There is no setting {name!r} of a run; {_hint(name, known)}")
    for name in _BOOLEAN:
        if not isinstance(given.get(name, False), bool):
            raise FederationError(f"The setting {name!r} must be true or false. Got {given[name]!r} instead.")
    for name in ("timeout", "pause", "wait"):
        value = given.get(name, DEFAULTS[name])
        if not _is_number(value) or value < 0 or (name == "timeout" and value == 0):
            least = "a number of seconds above 0" if name == "timeout" else "a number of seconds >= 0"
            raise FederationError(f"The setting {name!r} must be {least}. Got {value!r} instead.")
    retries = given.get("retries", DEFAULTS["retries"])
    if not isinstance(retries, int) or isinstance(retries, bool) or retries < 0:
        raise FederationError(f"The setting 'retries' must be a whole number >= 0. Got {retries!r} instead.")
    return given


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _hint(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"there are {listing(known, 50)}."


def spec_of(settings: Mapping[str, Any]) -> Spec:
    """The specification among some settings."""
    known = {each.name for each in fields(Spec)}
    chosen = {name: value for name, value in named(settings).items() if name in known}
    if isinstance(chosen.get("vary"), str):
        chosen["vary"] = [each.strip() for each in chosen["vary"].split(",")]
    spec = Spec(**chosen)
    spec.check()
    return spec


def terms_of(settings: Mapping[str, Any]) -> Terms:
    """What the operator decides, among some settings."""
    given = named(settings)
    patience = {name: given.get(name, DEFAULTS[name]) for name in ("timeout", "retries", "pause")}
    private, delta = privacy_of(given, str(given.get("family", "gaussian")))
    return Terms(
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
    columns = _columns_of(str(settings["formula"])) if settings.get("formula") else [*found]
    for name in found:
        if name not in columns:
            raise FederationError(f"The 'categories' name a column {name!r} that the formula has not; {_hint(name, columns)}")
    return found


def _columns_of(formula: str) -> list[str]:
    """The columns on both sides of a formula, and perhaps the names of functions of them."""
    response, terms = split_formula(formula)
    sides = [split_bars(terms)[0], *([] if response is None else [f"0 + {response}"])]
    factors = [factor for side in sides for factor in check_formula(side)]
    return [name for text, plain in factors for name in ([text] if plain else re.findall(r"[^\W\d]\w*", text))]


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
