"""A whole federated fit, as an operator starts it: settings in, models at the sites and at the operator's, a report out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from covey import __version__
from covey.design import design_from_json
from covey.errors import FederationError, listing, one_of
from covey.federation.agreement import Deliver
from covey.federation.coordinator import Exchange, Federation, SiteLost, Terms, new_run
from covey.federation.journal import Journal
from covey.federation.members import Members
from covey.federation.models import operator_model
from covey.federation.privacy import check_spec, fit_privately, privacy_of, promised, statement
from covey.federation.report import report
from covey.federation.transport import Transport
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
    run : its name, by which sites remember it
    privacy : what it promises: epsilon, delta, and how; None without differential privacy
    """

    model: Model
    exchanges: tuple[Exchange, ...]
    roster: tuple[str, ...]
    without: Mapping[str, str]
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
        while True:
            try:
                fitted = _fit(federation, spec)
                break
            except SiteLost as lost:
                if on_loss == "stop" and not lost.known:
                    raise _stopped(lost, book) from None
                federation.leave_out(lost)
                without |= lost.sites
                if not federation.roster:
                    raise FederationError(f"No site is left: {lost}") from None
        said = {
            "run": federation.journal.head["run"],
            "sites": list(federation.roster),
            "without": without,
            "privacy": _stated(federation),
        }
        federation.deliver(_delivered(fitted, said))
    except SiteLost as lost:
        raise _stopped(lost, book) from None
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"Interrupted; the run has stopped.{_kept(book)}") from None
    except BaseException:
        book.close(done=False)
        raise
    model = operator_model(federation, fitted)
    try:
        if out is not None:
            save_model(model, out, extra={"federation": said})
    except BaseException:
        book.close(done=False)
        raise
    book.close(done=True)
    return Outcome(model, tuple(federation.exchanges), federation.roster, without, said["run"], said["privacy"])


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


def _stopped(lost: SiteLost, book: Journal) -> FederationError:
    return FederationError(f"{str(lost).rstrip('.')}; the run has stopped.{_kept(book)}")


def _kept(book: Journal) -> str:
    """Close the journal of a run that is to go on, and say what is in it."""
    book.close(done=False)
    kept = f" {len(book.entries)} exchanges are kept in {str(book.path)!r}: run the same again."
    return "" if book.path is None else kept


def _delivered(fitted: Fitted, said: Mapping[str, Any]) -> Deliver:
    fit, penalty = fitted.fit, fitted.penalty
    learned = None if fitted.learned is None else learned_to_json(fitted.learned)
    lam = None if penalty is None else penalty.lam
    return Deliver(fit.w, fit.wbar, lam, asdict(fit.convergence), learned, dict(said))


def operate(transport: Transport, settings: Mapping[str, Any], say: Callable[[str], None]) -> str:
    """Run a fit from plain settings, as a command line or a Flower run has them; the text to print at its end."""
    spec, terms = spec_of(settings), terms_of(settings)
    out = Path(str(settings["out"])) if settings.get("out") else None
    if out is not None:
        check_target(out)
    roster = roster_of(transport, settings, terms.members)
    journal = None if out is None else out.with_name(f"{out.name}.journal")
    on_loss = settings.get("on_loss", settings.get("on-loss", "stop"))
    outcome = run_fit(transport, roster, spec, terms, journal=journal, out=out, on_loss=on_loss, say=say)
    text = report(outcome)
    return text if out is None else f"{text}\n\nmodel of clusters and of the whole written to {out}"


def spec_of(settings: Mapping[str, Any]) -> Spec:
    """The specification among some settings; what is empty is not set."""
    known = {each.name for each in fields(Spec)}
    plain = {name.replace("-", "_"): value for name, value in settings.items()}
    chosen = {name: value for name, value in plain.items() if name in known and value not in ("", None)}
    if isinstance(chosen.get("vary"), str):
        chosen["vary"] = [each.strip() for each in chosen["vary"].split(",")]
    spec = Spec(**chosen)
    spec.check()
    return spec


def terms_of(settings: Mapping[str, Any]) -> Terms:
    """What the operator decides, among some settings."""
    members = Members.read(settings.get("members") or None)
    given = {name: settings[name] for name in ("timeout", "retries", "pause", "secure") if settings.get(name) not in (None, "")}
    private, delta = privacy_of(settings, str(settings.get("family") or "gaussian"))
    return Terms(**given, members=members, categories=categories_of(settings), private=private, delta=delta)


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


def roster_of(transport: Transport, settings: Mapping[str, Any], members: Members) -> tuple[str, ...]:
    """Who takes part: the sites that are expected, all of which must be connected."""
    present, wanted = transport.sites(), settings.get("sites")
    names = [each.strip() for each in wanted.split(",")] if isinstance(wanted, str) and wanted else list(members.sites)
    missing = [site for site in names if site not in present]
    if missing:
        raise FederationError(f"Sites {listing(missing, 5)} are not connected; start their nodes, or leave them off the list.")
    if isinstance(wanted, int) and len(present) < wanted:
        raise FederationError(f"{len(present)} of {wanted} sites are connected: {listing(present, 5)}; start the others.")
    if not present:
        raise FederationError("No site is connected; start their nodes first.")
    return tuple(names) if names else present
