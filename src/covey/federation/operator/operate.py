"""A whole federated run: settings in, models at the sites and at the operator, and a report of the model, sites and costs."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from covey import __version__
from covey.errors import CoveyError, FederationError, ModelError, one_of
from covey.federation.operator.coordinator import Federation
from covey.federation.operator.exchanges import Exchanges, SiteLost, read_reply
from covey.federation.operator.journal import Exchange, ForeignJournal, Halted, Journal
from covey.federation.operator.settings import RunSettings, expected_sites, spec_of
from covey.federation.privacy.differential import fit_privately, privacy_statement
from covey.federation.wire.codec import Envelope, printable
from covey.federation.wire.messages import AskReady, Deliver, Ready
from covey.federation.wire.transport import Failure, Transport, wait_for_sites
from covey.fitting.fit import fit, model_without_clients
from covey.fitting.planning import size
from covey.model.files import check_target, learned_to_json, save_model
from covey.model.model import Elsewhere, Model
from covey.model.summary import describe, table
from covey.problem.problem import Problem, resolve
from covey.problem.rows import used_columns
from covey.records import encode
from covey.tables.values import Dropped

OnLoss = Literal["stop", "continue"]
ON_LOSS = ("stop", "continue")
AGREE = 1e-8  # tolerance for coefficients: a search for variances stops at a tolerance of its own


@dataclass(frozen=True)
class Outcome:
    """The result of a federated run.

    Attributes
    ----------
    model : Model
        Clusters and the global model; the models of the clients are at their sites.
    exchanges : tuple of Exchange
        All messages to sites, with the costs of each and of its replies.
    roster : tuple of str
        Sites that took part to the end.
    without : dict of str
        Sites that were lost, and why.
    missed : dict of str
        Sites that took part, but were lost before they got the models of the clusters, and why.
    run : str
        Name of the run, under which the sites remember it.
    privacy : dict or None
        Epsilon, delta, clip, noise and number of releases; None without differential privacy.
    """

    model: Model
    exchanges: tuple[Exchange, ...]
    roster: tuple[str, ...]
    without: Mapping[str, str]
    missed: Mapping[str, str]
    run: str
    privacy: Mapping[str, Any] | None = None


_COST = ("label", "phase", "sites", "down", "up")  # what a saved model says of each exchange


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
    """Fit a problem across the sites of a roster.

    Parameters
    ----------
    transport : connection to the sites
    roster : names of the sites
    draft : the problem; the sites still have to agree on its categories and clusters
    settings : settings of the run
    journal : file for messages and sums of replies; if it holds those of the same run, which was killed, the run continues to
        the same bits
    out : folder for the models of the clusters and the global model; it is written before the journal is deleted
    on_loss : if a site is lost, "stop", to continue later from the journal, or "continue" without it, from the start
    say : called with a line about the current step

    Returns
    -------
    Outcome
        The model, the messages that were sent, and the sites that took part.
    """
    settings.check(draft)
    if on_loss not in ON_LOSS:
        raise one_of("on_loss", on_loss, ON_LOSS)
    about: dict[str, Any] = {"covey": __version__, "spec": draft.spec.to_json(), "roster": tuple(sorted(roster))}
    about |= {"secure": settings.secure, "private": settings.private}
    # Drawn for each run: a name that is never used twice, and the key of the client tags.
    run_journal = Journal(journal, about, {"run": secrets.token_hex(8), "salt": secrets.token_hex(16)})
    exchanges, without = Exchanges(transport, about["roster"], run_journal, settings, say), dict[str, str]()
    federation = Federation(exchanges, draft)
    if run_journal.entries:
        say(f"continuing a run that was stopped: {len(run_journal.entries)} messages are in the journal")
    try:
        model = _fit_with_sites_left(federation, on_loss, without)
        private, run = _privacy_of_run(federation), run_journal.head["run"]
        about_run = {"run": run, "sites": list(exchanges.roster), "without": without, "privacy": private}
        if out is not None:
            sent = [{name: getattr(each, name) for name in _COST} for each in exchanges.made]
            save_model(model, out, extra={"federation": {**about_run, "exchanges": sent}})
        missed = _deliver(federation, model, about_run, on_loss)
    except BaseException as problem:
        ended = _ended(problem, exchanges)
        if ended is problem:
            raise
        raise ended from None
    run_journal.close(done=True)
    return Outcome(model, tuple(exchanges.made), exchanges.roster, without, missed, run, private)


def _fit_with_sites_left(federation: Federation, on_loss: OnLoss, without: dict[str, str]) -> Model:
    """Fit; with ``on_loss="continue"`` again without the sites that are lost, which are added to ``without``."""
    while True:
        try:
            return _fit(federation)
        except SiteLost as lost:
            if on_loss == "stop" and not lost.in_journal:
                raise
            federation.leave_out(lost)
            without |= lost.sites
            if not federation.exchanges.roster:
                raise Halted(f"No site is left: {lost} Start the nodes and run the same command again.") from None


def _fit(federation: Federation) -> Model:
    federation.open()
    problem, totals, private = federation.problem, federation.totals, federation.settings.private
    dropped, stated = None, _privacy_of_run(federation)
    if totals.dropped is not None:
        rows, of, *counts = totals.dropped.tolist()
        dropped = Dropped(rows, of, dict(zip(used_columns(problem), counts, strict=False)))
    elsewhere = Elsewhere(federation.exchanges.roster, totals.clients, totals.rows, dropped)
    if private is None or stated is None:
        return fit(federation, problem, elsewhere=elsewhere)
    return model_without_clients(problem, fit_privately(federation, problem.spec, private, stated), federation.tree, elsewhere)


def _privacy_of_run(federation: Federation) -> dict[str, Any] | None:
    """Epsilon and delta of a private fit, over all its starts."""
    private, delta = federation.settings.private, federation.settings.delta
    return None if private is None else privacy_statement(private, delta, federation.exchanges.epoch + 1)


def _deliver(federation: Federation, model: Model, about: Mapping[str, Any], on_loss: OnLoss) -> dict[str, str]:
    """Send the sites the models of the clusters; the sites that did not get them, if the run may end without them, and why."""
    learned, whole = model.learned, None if model.learned is None else model.learned.whole
    if learned is not None and whole is not None:
        learned = replace(learned, whole=whole.without_scores())
    plain = None if learned is None else learned_to_json(learned)
    lam = None if model.penalty is None else model.penalty.lam
    try:
        federation.deliver(Deliver(model.w, model.wbar, lam, asdict(model.convergence), plain, dict(about)))
    except SiteLost as lost:
        if on_loss == "stop":
            raise
        return lost.sites
    return {}


def _ended(problem: BaseException, exchanges: Exchanges) -> BaseException:
    """Close the journal of a run that stopped; returns the error to raise.

    The journal is kept if the fit has begun and can continue. Else it would only be in the way, and the sites forget the run.
    """
    journal, begun, what = exchanges.journal, exchanges.journal.begun, ""
    if isinstance(problem, CoveyError):
        keep = isinstance(problem, ModelError | ForeignJournal) or (begun and isinstance(problem, Halted | SiteLost))
        what = str(problem).rstrip(".") if isinstance(problem, SiteLost) else ""
    elif isinstance(problem, Exception) and not isinstance(problem, Warning):
        # Sums that fit their schema may still be nonsense together; an error of another library would not say so.
        keep = begun and isinstance(problem, OSError)
        what = f"The fit has failed with the sums of the sites ({type(problem).__name__}: {printable(problem)[:200]})"
        if isinstance(problem, OSError):
            what = f"The coordinator cannot go on ({printable(problem.strerror or problem)})"
    else:
        keep, what = begun or not isinstance(problem, KeyboardInterrupt), "Interrupted" * isinstance(problem, KeyboardInterrupt)
    journal.close(done=not keep)
    if isinstance(problem, Exception | KeyboardInterrupt) and not (keep and journal.path is not None):
        exchanges.abandon()
    if not what:
        return problem
    kept = f" {len(journal.entries)} messages are kept in {str(journal.path)!r}; run the same command again to continue."
    sentence = f"{what}; the run has stopped.{kept if keep and journal.path is not None else ''}"
    return KeyboardInterrupt(sentence) if isinstance(problem, KeyboardInterrupt) else FederationError(sentence)


def dry_run(transport: Transport, roster: Sequence[str], draft: Problem, settings: RunSettings) -> str:
    """Ask all sites whether they would take part in a run; one line for each."""
    ask = AskReady(__version__, draft.to_json(), settings.secure, settings.private)
    message = encode(Envelope(secrets.token_hex(8), 0, 0, ask))
    came = transport.exchange(dict.fromkeys(roster, message), settings.timeout)
    lines = []
    for site in sorted(roster):
        found = read_reply(message, came.get(site, Failure("it sent no reply; see the log at the site")), settings.limits)
        body = found.why if isinstance(found, Failure) else found.body
        lines.append(printable(f"{site}: {body.would if isinstance(body, Ready) else body}"))
    return "\n".join(lines)


def operate(transport: Transport, settings: Mapping[str, Any], say: Callable[[str], None]) -> str:
    """Wait for the sites, run a fit with the settings of a command, and return the text to print at its end."""
    draft, run = resolve(spec_of(settings)), RunSettings.of(settings)
    run.check(draft)
    out = None if settings.get("out") is None else check_target(Path(settings["out"]))
    roster = wait_for_sites(transport, expected_sites(settings.get("sites"), run.members), run.patience, say)
    if settings.get("dry_run"):
        return dry_run(transport, roster, draft, run)
    journal, on_loss = None if out is None else out.with_name(f"{out.name}.journal"), settings.get("on_loss", "stop")
    outcome = run_fit(transport, roster, draft, run, journal=journal, out=out, on_loss=on_loss, say=say)
    text = report(outcome)
    return text if out is None else f"{text}\n\nmodels of the clusters and the global model written to {out}"


# The report


def report(outcome: Outcome) -> str:
    """The report of a run."""
    return "\n".join([describe(outcome.model), "", *site_lines(outcome), "", *costs(outcome.exchanges)])


def agreement(outcome: Outcome, apart: float) -> str:
    """Whether a run gives the coefficients of the fit in memory, and what was sent for it."""
    if apart <= AGREE:
        result = f"coefficients of clients, clusters and the global model agree with the above (largest difference {apart:.0e})"
    else:
        result = f"coefficients differ from those above by up to {apart:.1e}"
    head = f"The same fit across {len(outcome.roster)} sites that keep their rows: {result}."
    return "\n".join([head, "What was sent:", *costs(outcome.exchanges)])


def site_lines(outcome: Outcome) -> list[str]:
    """The sites that took part, and those that did not."""
    lines = [f"Sites: {', '.join(outcome.roster)}"]
    lines += [f"Without {site} ({why}): its clients are in no sum of this fit" for site, why in outcome.without.items()]
    late = "took part, but was lost at the end"
    lines += [f"{site} {late} ({why}): it has no models of its clients from this fit" for site, why in outcome.missed.items()]
    return lines


def costs(exchanges: Sequence[Exchange]) -> list[str]:
    """A table of what was sent, by label of the message."""
    labels = dict.fromkeys(each.label for each in exchanges)
    groups = {label: [each for each in exchanges if each.label == label] for label in labels} | {"in all": exchanges}
    rows = [("message", "times", "sites", "down", "up", "seconds")]
    for label, group in groups.items():
        down, up, seconds = (sum(getattr(each, name) for each in group) for name in ("down", "up", "seconds"))
        sites = max((each.sites for each in group), default=0)
        rows.append((label, str(len(group)), str(sites), size(down), size(up), f"{seconds:.2f}"))
    return table(rows, (-26, 6, 6, 11, 11, 9))
