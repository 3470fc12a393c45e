"""A whole federated fit, as an operator starts it: settings in, models at the sites and at the operator's, a report out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from covey import __version__
from covey.errors import CoveyError, FederationError, ModelError, one_of
from covey.federation.models import operator_model
from covey.federation.operator.agreement import Deliver
from covey.federation.operator.coordinator import Exchange, Federation, Halted, RunSettings, new_run
from covey.federation.operator.journal import ForeignJournal, Journal
from covey.federation.operator.replies import SiteLost
from covey.federation.operator.report import report
from covey.federation.operator.settings import named, roster_of, spec_of, terms_of
from covey.federation.privacy.accounting import check_spec, fit_privately, promised, statement
from covey.federation.wire.transport import Transport
from covey.fitting.fit import check_elsewhere, check_solver, learn
from covey.model.files import check_target, learned_to_json, save_model
from covey.model.model import Fitted, Model
from covey.problem.problem import resolve
from covey.problem.spec import Spec
from covey.tables.design import design_from_json

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
    terms: RunSettings,
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
    check_solver(spec)
    check_elsewhere(spec)
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
        "spec": spec.to_json(),
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
    draft = resolve(spec)
    stated = _stated(federation)
    if federation.how.private is not None and stated is not None:
        return promised(fit_privately(federation, draft.spec, federation.how.private), stated)
    design = design_from_json(federation.agreed.design, None if draft.formula is None else draft.formula.common)
    return learn(federation, draft.of_design(design, None, spec.offset is not None, draft.spec.nested))


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
