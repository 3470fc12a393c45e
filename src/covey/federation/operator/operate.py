"""A whole federated fit, as an operator starts it: settings in, models at the sites and at the operator's, a report out."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from covey import __version__
from covey.errors import CoveyError, FederationError, ModelError, one_of
from covey.federation.operator.coordinator import Federation
from covey.federation.operator.exchanges import Halted
from covey.federation.operator.journal import Exchange, ForeignJournal, Journal
from covey.federation.operator.replies import SiteLost
from covey.federation.operator.report import report
from covey.federation.operator.settings import RunSettings, check_categories, named, roster_of, run_settings_of, spec_of
from covey.federation.privacy.accounting import check_spec, fit_privately, promised, statement
from covey.federation.wire.agreement import Deliver
from covey.federation.wire.transport import Transport
from covey.fitting.fit import check_elsewhere, check_solver, fit, model_without_clients
from covey.model.files import check_target, learned_to_json, save_model
from covey.model.model import Elsewhere, Model
from covey.problem.problem import Problem, resolve

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
    missed : sites that took part and were lost before they got the models of clusters, and why
    run : its name, by which sites remember it
    secure : whether sums were masked
    privacy : what it promises: epsilon, delta, and how; None without differential privacy
    """

    model: Model
    exchanges: tuple[Exchange, ...]
    roster: tuple[str, ...]
    without: Mapping[str, str]
    missed: Mapping[str, str]
    run: str
    secure: bool = False
    privacy: Mapping[str, Any] | None = None


def run_fit(
    transport: Transport,
    roster: Sequence[str],
    draft: Problem,
    settings: RunSettings,
    *,
    journal: Path | None = None,
    out: Path | None = None,
    on_loss: OnLoss = "stop",
    say: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Fit a problem, whose categories and clusters the sites are still to agree on, across the sites of a roster.

    Parameters
    ----------
    journal : file to write exchanges to; if it holds those of the same run, killed, that run goes on to the same bits
    out : folder for the models of clusters and of the whole, written before the journal is given up
    on_loss : what to do when a site is lost: "stop", to go on later from the journal, or "continue" without it, from the start
    say : called with what is being done, for a live line
    """
    check_solver(draft.spec)
    check_elsewhere(draft.spec)
    check_categories(settings.categories, draft)
    if settings.secure and settings.members.clients:
        raise FederationError(
            "Under masks the coordinator cannot check clients' ids against its list; leave the column client out of it, or "
            "leave out --secure."
        )
    if on_loss not in ON_LOSS:
        raise one_of("on_loss", on_loss, ON_LOSS)
    if settings.private is not None:
        check_spec(draft.spec)
    about = {
        "covey": __version__,
        "spec": draft.spec.to_json(),
        "roster": tuple(sorted(roster)),
        "secure": settings.secure,
        "private": settings.private,
    }
    book = Journal(journal, about, _new_run())
    federation = Federation(transport, roster, draft, book, settings, say)
    without: dict[str, str] = {}
    try:
        model = _fit_with_sites_left(federation, on_loss, without)
        about_run = {
            "run": federation.journal.head["run"],
            "sites": list(federation.roster),
            "without": without,
            "privacy": _promise(federation),
        }
        if out is not None:
            save_model(model, out, extra={"federation": about_run})
        missed = _deliver(federation, _delivered(model, about_run), on_loss)
    except SiteLost as lost:
        raise FederationError(f"{str(lost).rstrip('.')}; the run has stopped.{_kept(book)}") from None
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"Interrupted; the run has stopped.{_kept(book)}") from None
    except BaseException as problem:
        book.close(done=_is_useless(book, problem))
        raise
    book.close(done=True)
    run, private = book.head["run"], about_run["privacy"]
    return Outcome(model, federation.exchanges, federation.roster, without, missed, run, settings.secure, private)


def _fit_with_sites_left(federation: Federation, on_loss: OnLoss, without: dict[str, str]) -> Model:
    """Fit; with ``on_loss="continue"`` anew without the sites that are lost, which go into ``without``."""
    while True:
        try:
            return _fit(federation)
        except SiteLost as lost:
            if on_loss == "stop" and not lost.in_journal:
                raise
            federation.leave_out(lost)
            without |= lost.sites
            if not federation.roster:
                raise Halted(f"No site is left: {lost}") from None


def _deliver(federation: Federation, body: Deliver, on_loss: OnLoss) -> dict[str, str]:
    """Send the models of clusters to the sites; those that did not get them, if the run may end without: why not."""
    try:
        federation.deliver(body)
    except SiteLost as lost:
        if on_loss == "stop":
            raise
        return lost.sites
    return {}


def _is_useless(book: Journal, problem: BaseException) -> bool:
    """Whether a journal is only in the way: the fit has not begun, or the same exchanges would end in the same mistake."""
    if not isinstance(problem, CoveyError) or isinstance(problem, ForeignJournal | ModelError):
        return False
    return not book.begun or not isinstance(problem, Halted)


def _fit(federation: Federation) -> Model:
    federation.open()
    problem, private, promise = federation.problem, federation.settings.private, _promise(federation)
    elsewhere = Elsewhere(federation.roster, federation.totals.clients, federation.totals.rows)
    if private is None or promise is None:
        return fit(federation, problem, elsewhere=elsewhere)
    fitted = promised(fit_privately(federation, problem.spec, private), promise)
    return model_without_clients(problem, fitted, federation.tree, elsewhere)


def _promise(federation: Federation) -> dict[str, Any] | None:
    """What a private fit promises, over all its starts."""
    private, delta = federation.settings.private, federation.settings.delta
    return None if private is None else statement(private, delta, federation.starts)


def _new_run() -> dict[str, Any]:
    """What is drawn for each run: its name, never used twice, and the key of the clients' tags."""
    return {"run": secrets.token_hex(8), "salt": secrets.token_hex(16)}


def _kept(book: Journal) -> str:
    """Close the journal of a run that is to go on, and say what is in it; before the fit has begun there is nothing to keep."""
    book.close(done=not book.begun)
    kept = f" {len(book.entries)} exchanges are kept in {str(book.path)!r}: run the same again."
    return kept if book.begun and book.path is not None else ""


def _delivered(model: Model, about: Mapping[str, Any]) -> Deliver:
    learned = None if model.learned is None else learned_to_json(model.learned)
    lam = None if model.penalty is None else model.penalty.lam
    return Deliver(model.w, model.wbar, lam, asdict(model.convergence), learned, dict(about))


def operate(transport: Transport, settings: Mapping[str, Any], say: Callable[[str], None]) -> str:
    """Run a fit from plain settings, as a command line or a Flower run has them; the text to print at its end."""
    given, draft, run = named(settings), resolve(spec_of(settings)), run_settings_of(settings)
    out = Path(str(given["out"])) if "out" in given else None
    if out is not None:
        check_target(out)
    roster = roster_of(transport, given, run.members)
    journal = None if out is None else out.with_name(f"{out.name}.journal")
    on_loss = given.get("on_loss", "stop")
    outcome = run_fit(transport, roster, draft, run, journal=journal, out=out, on_loss=on_loss, say=say)
    text = report(outcome)
    return text if out is None else f"{text}\n\nmodel of clusters and of the whole written to {out}"
