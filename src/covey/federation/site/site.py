"""A site: it answers messages from its own table, as far as its policy allows.

A site answers the exchanges of a run in order, and each one once. If the same message comes again, it sends the same bytes
again. If a message belongs to another exchange, it refuses and says at which exchange it is. Between two messages the process
may end: all that the site needs is in its home folder, which only its owner can read.

    home/
      site.toml        what the site allows, and where its table, its key and the link are
      audit.jsonl      one line for each message and decision
      questions.json   runs that wait for the owner, and those that have joined
      released.json    keyed hashes of the clients of earlier runs
      privacy.json     epsilon that was spent
      runs/            what it remembers of each run
      model/           the models of its own clients, after a run; they do not leave the site
"""

from __future__ import annotations

import hashlib
import secrets
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import covey.fitting.fit  # noqa: F401 - registers the messages of the likelihood
from covey import __version__
from covey.errors import CoveyError, FederationError
from covey.federation.privacy.differential import Draw
from covey.federation.privacy.masking import Keys, seal
from covey.federation.privacy.signing import fingerprint, sign
from covey.federation.site.approval import Approvals, Waiting
from covey.federation.site.audit import AuditLog
from covey.federation.site.budget import Budget, check_private_message
from covey.federation.site.engine import counted_rows, draft_rows, site_part, table_for
from covey.federation.site.masks import Peers, check_peers, join_masked_run, masked, pair_secrets, public_key, signed
from covey.federation.site.policy import ANY, Policy, check_model_folder, refusal
from covey.federation.site.release import NUMBER, Released, WeakSum, weak_sums
from covey.federation.site.state import RunStore, SiteRun, locked
from covey.federation.site.table import check_design, check_shared, joined, profile_of, rows_digest, totals
from covey.federation.wire.codec import SAME_VERSION, Envelope, Refusal, printable_texts
from covey.federation.wire.messages import (
    Abandon,
    Agree,
    AskReady,
    Deliver,
    DrawSalt,
    Hello,
    Privacy,
    Profile,
    Ready,
    RunDraft,
    SealedSalts,
    SiteMessage,
)
from covey.federation.wire.schema import Limits, check_message
from covey.model.files import save_model, uncertainty_from_json
from covey.model.model import Fitted, Model, assemble
from covey.nodes.network import Batch, Message, Node, SetGamma, Standardise
from covey.objective.objective import Penalty
from covey.problem.problem import Problem, Spec
from covey.records import decode, encode
from covey.solvers.registry import load_all
from covey.solvers.result import Convergence, Fit
from covey.tables.formula import parse_formula
from covey.tables.rows import GroupedData
from covey.tables.scaling import Scale
from covey.variance.columns import node_learned
from covey.variance.components import Components, Whole

load_all()  # registers the messages of all solvers

Read = Callable[[Spec], Any]
"""Reads a site's table; the specification says which columns hold ids."""

MOST_STARTS = 8  # a run starts again if a site is lost; each start could ask for sums at other penalties


@dataclass
class Site:
    """One site.

    Parameters
    ----------
    name : the name that the operator gave it
    read : reads its table
    policy : what it allows
    home : folder for its state; None keeps the state in this object, for simulation
    models : folder for its clients' models; by default ``home/model``
    budget : how much epsilon it may spend, and has spent
    draw : source of the noise; None is the system's randomness. Only simulations use another
    identity : the private key of its node, with which it signs its mask keys; None in a simulation
    peers : public keys of the other sites by name, several while one is replaced; None in a simulation, where none are checked
    """

    name: str
    read: Read
    policy: Policy = field(default_factory=Policy)
    home: Path | None = None
    models: Path | None = None
    budget: Budget = field(default_factory=Budget)
    draw: Draw | None = None
    identity: Any = None
    peers: Peers | None = None

    def __post_init__(self) -> None:
        if self.models is None and self.home is not None:
            self.models = self.home / "model"
        self.audit, self._approvals = AuditLog(self.home), Approvals(self.home, self.policy)
        self._runs, self._released = RunStore(self.home), Released(self.home)
        self._nodes: dict[str, tuple[Node, Problem]] = {}

    def answer(self, message: bytes, operator: str = "") -> bytes:
        """The reply to one encoded message of an operator, given by the public key whose signature was verified.

        An error is part of the reply, in a sentence that holds no data.
        """
        asked, refused = None, None
        try:
            asked = decode(message, Limits.header)
            if not isinstance(asked, Envelope) or not asked.well_formed:
                asked = None
                raise FederationError(f"These bytes are not the envelope of a message from a coordinator{SAME_VERSION}.")
            _check_message(asked.body)
            with locked(self.home):
                sent = self._answer(asked, message, operator)
        except Waiting as problem:
            refused = Refusal("waiting", str(problem))
        except CoveyError as problem:
            refused = Refusal("data", self.policy.public_sentence(problem, self.home))
        except OSError as problem:
            traceback.print_exc()
            refused = Refusal("broken", f"its disk: {problem.strerror}")
        except Exception as problem:  # an error of the program; its text could hold values of rows, so it stays here
            traceback.print_exc()
            refused = Refusal("broken", f"{type(problem).__name__} in covey {__version__}")
        if refused is not None:
            sent = encode(_refused(asked, refused))
        self._write_down(asked, operator, len(message), len(sent), refused)
        return sent

    def _write_down(self, asked: Any, operator: str, came: int, left: int, refused: Refusal | None) -> None:
        """One line of the audit log about a message and its reply."""
        about: dict[str, Any] = {"kind": "unreadable", "operator": fingerprint(operator), "in": came, "out": left}
        if isinstance(asked, Envelope):
            parts = asked.body.parts if isinstance(asked.body, Message) else (asked.body,)
            about["kind"] = ", ".join(getattr(part, "label", "unknown") for part in parts)
            about |= {"run": asked.run[:40], "epoch": asked.epoch, "exchange": asked.exchange}
            if asked.run in self._nodes:
                about["cells"] = int((self.node(asked.run).data.hierarchy.sizes > 0).sum())
        if refused is not None:
            about |= {"refused": refused.reason, "sentence": refused.sentence}
        self.audit.add("message", **about)

    def node(self, run: str) -> Node:
        """The node of a run, for simulation and tests."""
        return self._nodes[run][0]

    def _answer(self, asked: Envelope, message: bytes, operator: str) -> bytes:
        if self.policy.operators is not None and not {operator, ANY} & {*self.policy.operators}:
            who = f"This site does not know the operator with key {fingerprint(operator) or 'none'}; sign with --operator-key"
            raise refusal("operators", who, "add the operator's public key to the list")
        if isinstance(asked.body, AskReady):
            return encode(replace(asked, body=self._ready(asked.body, operator)))
        if isinstance(asked.body, Hello):
            return encode(replace(asked, body=self._introduce(asked, asked.body, operator)))
        if isinstance(asked.body, DrawSalt):
            return encode(replace(asked, body=self._draw_salt(asked, asked.body)))
        run, digest = self._runs.load(asked.run), hashlib.sha256(message).hexdigest()
        if (asked.epoch, asked.exchange) == (run.epoch, run.exchange) and run.digest == digest:
            return run.reply
        if run.agreed is not None and operator != run.operator:
            raise FederationError("Another operator began this run; start a new one.")
        if isinstance(asked.body, Abandon):
            self._runs.drop(asked.run)
            self._nodes.pop(asked.run, None)
            return encode(replace(asked, body=None))
        out_of_step = _out_of_step(asked, run)
        if out_of_step is not None:
            return encode(_refused(asked, out_of_step))
        reply: Any
        if isinstance(asked.body, Agree):
            run, reply = self._join(asked, asked.body, run, operator)
        elif isinstance(asked.body, Deliver):
            run, reply = self._finish(asked, asked.body, run)
        else:
            run, reply = self._work(asked, run)
        sent = encode(replace(asked, body=reply))
        # Only a message that succeeds changes the state of the run.
        self._runs.save(asked.run, replace(run, epoch=asked.epoch, exchange=asked.exchange, digest=digest, reply=sent))
        return sent

    # Before the fit

    def _check_asked(self, asked: RunDraft, run: str = "", epoch: int = 0) -> Problem:
        """The draft of a problem, if the policy allows it; no row is read."""
        if asked.version != __version__:
            raise FederationError(f"This site runs covey {__version__}, the coordinator {asked.version}; install the same.")
        self.budget.admit(asked.private, run, epoch)
        draft = _read_problem(asked.problem)
        self.policy.check_problem(draft)
        if self.policy.secure and not asked.secure:
            raise refusal("secure", "This site sends its sums under masks only; start the run with --secure", "set it to false")
        return draft

    def _introduce(self, asked: Envelope, hello: Hello, operator: str) -> Profile:
        draft = self._check_asked(hello, asked.run, asked.epoch)
        check_model_folder(self.models)  # before the fit, not after it
        self._approvals.admit(asked.run, _question(draft, operator, hello.secure, hello.private), join=False)
        run = self._runs.load(asked.run)
        if hello.secure:
            run = replace(run, key=run.key or Keys.fresh().private.hex())
            self._runs.save(asked.run, run)
        key = public_key(run) if hello.secure else ""
        private = hello.private is not None
        table = table_for(self.read(draft.spec), draft, private=private)
        profile = profile_of(table, draft, key, self.policy.minimum, private=private)
        signature = sign(self.identity, *signed(asked.run, self.name, key)) if key and self.identity is not None else ""
        return replace(profile, signature=signature, vectors=self.policy.replies == "vectors")

    def _ready(self, asked: AskReady, operator: str) -> Ready:
        """Whether this site would take part in a run; it names no cell and no value."""
        draft = self._check_asked(asked)
        if self.policy.approve != "policy":
            return Ready("its owner would be asked")
        private = asked.private is not None
        profile_of(table_for(self.read(draft.spec), draft, private=private), draft, "", self.policy.minimum, private=private)
        if asked.private is None and self.weak_sums(draft):
            why = "This site has sums over too few clients, or with a client that dominates"
            raise refusal("minimum", f"{why}; covey site check names them there", "lower 'minimum' or raise 'share'")
        return Ready("it would take part")

    def weak_sums(self, draft: Problem) -> list[WeakSum]:
        """The sums of a problem that may not leave this site."""
        data, _ = draft_rows(self.read(draft.spec), draft)
        return list(weak_sums(data, self.policy.minimum, self.policy.share, moments=draft.spec.standardize))

    def _draw_salt(self, asked: Envelope, wanted: DrawSalt) -> SealedSalts:
        """Draw the key of the tags, once for each run, and seal it for each other site."""
        run = self._runs.load(asked.run)
        if not run.key:
            raise FederationError("This site has no key for this run; start a new run.")
        check_peers(self.name, self.peers, self.policy, asked.run, wanted)
        run = replace(run, salt=run.salt or secrets.token_hex(16))
        self._runs.save(asked.run, run)
        shared, salt = pair_secrets(self.name, asked.run, run, wanted.keys), bytes.fromhex(run.salt)
        return SealedSalts({other: seal(key, salt, f"salt for {other}").hex() for other, key in shared.items()})

    def _join(self, asked: Envelope, agreed: Agree, run: SiteRun, operator: str) -> tuple[SiteRun, Any]:
        if self.name not in agreed.roster:
            fix = "add it to --sites and start a new run, or stop its node"
            raise FederationError(f"Site {self.name!r} is not on the roster of this run; {fix}.")
        self.budget.admit(agreed.private, asked.run, asked.epoch)
        if asked.epoch >= MOST_STARTS:
            why = f"This run has started {MOST_STARTS} times, the most that a site allows; start a new run"
            raise FederationError(f"{why}. If no site was lost, poly needed too many passes: lower its degree.")
        problem, private = _read_problem(agreed.problem), agreed.private is not None
        self.policy.check_problem(problem)
        design = check_design(problem, private=private)
        if (run.key or self.policy.secure) and not agreed.keys:
            raise FederationError("This run needs masks, but the agreement has no keys; start a new run with --secure.")
        if agreed.keys:
            check_peers(self.name, self.peers, self.policy, asked.run, agreed)
            run = join_masked_run(self.name, asked.run, run, agreed)
        question = _question(problem, operator, bool(agreed.keys), agreed.private)
        self._approvals.admit(asked.run, question, join=True, going_on=run.agreed is not None)
        self._runs.forget(self.policy.retention)
        for ended in [name for name in self._nodes if self._runs.load(name).agreed is None]:
            del self._nodes[ended]  # with its copy of the rows
        table = table_for(self.read(problem.spec), problem, private=private)
        used = counted_rows(table, problem)
        check_shared(used, problem.spec, design.levels, self.policy.minimum)  # a coordinator may have asked less in its hello
        data = site_part(table, problem, agreed.cluster_ids())
        minimum, share, moments = self.policy.minimum, self.policy.share, problem.spec.standardize
        self._check_sums(weak_sums(data, minimum, 1.0 if private else share, moments=moments), private=private)
        if design.unlearned:
            first_sums = site_part(table, problem, agreed.cluster_ids(), learning=True)
            self._check_sums(weak_sums(first_sums, minimum, share, combined=False, moments=True), private=False)
        if not private:  # noise hides a difference of a few clients
            self._released.admit(asked.run, data, self.policy)
        run = replace(
            run, operator=operator, agreed=agreed, rows=rows_digest(data), node=None, rosters=(*run.rosters, agreed.roster)
        )
        self._nodes[asked.run] = self._new_node(data, problem), problem
        learning = design.sums(used) if design.unlearned else None
        first = totals(data, standardize=problem.spec.standardize, private=private, learning=learning)
        hashes = joined(data, run.salt if agreed.keys else agreed.salt, listed=agreed.listed)
        return run, (hashes, masked(self.name, asked, run, first))

    def _check_sums(self, found: Iterable[WeakSum], *, private: bool) -> None:
        """Refuse sums over too few clients; with noise, which hides single clients, only the number of clients counts."""
        for weak in found:
            if private and weak.term != NUMBER:
                continue
            self.audit.add("weak sum", cell=str(weak.cell), term=weak.term, clients=weak.clients, share=round(weak.share, 3))
            where = f"Term {weak.term!r} in cluster {weak.cell!r}" if self.policy.share_row_errors else "At this site"
            many, named = weak.clients < self.policy.minimum, "covey site check names such sums there"
            few = "differ from the others in a column" if weak.rare else "contribute to a sum"
            few = f"fewer than {self.policy.minimum} clients {few}"
            large = f"one client has more than {self.policy.share:g} of a sum of squares"
            change = f"{'lower' if many else 'raise'} the number, or let clients be grouped more coarsely"
            raise refusal("minimum" if many else "share", f"{where} {few if many else large}; {named}", change)

    # The fit

    def _work(self, asked: Envelope, run: SiteRun) -> tuple[SiteRun, Any]:
        """Let the node answer a message; if that fails, the node stays as it was."""
        node, problem = self._open(asked.run, run)
        private = None if run.agreed is None else run.agreed.private
        noisy = check_private_message(asked.body, private)
        self.policy.check_message(asked.body, asked.exchange)
        check_message(asked.body, node)
        _check_set_once(asked.body, node, problem)
        data, before = node.data, node.snapshot()
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                reply = asked.body.at(node)
            self.policy.check_reply(reply, data.n_clusters, data.n_terms)
            if noisy and private is not None:
                self.budget.charge(private, asked.run, asked.epoch, asked.exchange)
        except BaseException:
            node.data = data
            node.restore(before)
            raise
        run = replace(run, node=node.snapshot())
        return run, masked(self.name, asked, run, reply)

    def _finish(self, asked: Envelope, delivered: Deliver, run: SiteRun) -> tuple[SiteRun, None]:
        """Write the models of the site's clients, and forget the rest of the run."""
        node, problem = self._open(asked.run, run)
        if self.models is not None:
            check_model_folder(self.models)
            texts = ("convergence", "learned", "about")
            delivered = replace(delivered, **{name: printable_texts(getattr(delivered, name)) for name in texts})
            save_model(_site_model(node, problem, delivered), self.models, extra=delivered.about)
        return SiteRun(operator=run.operator), None

    def _open(self, name: str, run: SiteRun) -> tuple[Node, Problem]:
        """The node and the problem of a run; after a restart from the table and the saved state."""
        if run.agreed is None:
            raise FederationError("This site has not joined the run; start a new run.")
        if name not in self._nodes:
            problem = Problem.from_json(run.agreed.problem)
            table = table_for(self.read(problem.spec), problem, private=run.agreed.private is not None)
            data = site_part(table, problem, run.agreed.cluster_ids())
            if rows_digest(data) != run.rows:
                raise FederationError("The table has changed since the run began; put it back, or start a new run.")
            node = self._new_node(data, problem)
            if run.node is not None:
                node.restore(run.node)
                scale = node.find(Scale)
                node.data = data if scale is None else scale.rows(data)
            self._nodes[name] = node, problem
        return self._nodes[name]

    def _new_node(self, data: GroupedData, problem: Problem) -> Node:
        return Node(data, problem.loss, np.ones(data.n_clients), draw=self.draw)


def _read_problem(plain: Mapping[str, Any]) -> Problem:
    """The problem of a message, whose settings and formula are checked.

    The owner approves a text, so the site reads it too: the parsed formula of a changed coordinator could ask for more.
    """
    try:
        problem = Problem.from_json(plain)
        same = problem.spec.formula is not None and parse_formula(problem.spec.formula) == problem.formula
    except CoveyError:
        raise
    except Exception:
        raise FederationError(f"The problem in this message cannot be read{SAME_VERSION} and start a new run.") from None
    if not same:
        text = problem.spec.formula
        raise FederationError(f"The parsed formula in this message is not that of its text {text!r}{SAME_VERSION}.")
    return problem


def _question(problem: Problem, operator: str, secure: bool, private: Privacy | None) -> dict[str, Any]:
    """What a run asks for, without what the sites agree on: the owner approves exactly this."""
    plain = problem.to_json()
    noise = None if private is None else {"noise": private.noise, "clip": private.clip, "rounds": private.rounds}
    spec = {name: value for name, value in plain["spec"].items() if name != "nested"}
    return {"operator": operator, "spec": spec, "formula": plain["formula"], "secure": secure, "private": noise}


def _site_model(node: Node, problem: Problem, delivered: Deliver) -> Model:
    """The site's own clients under the clusters of all sites: a model that predicts, with intervals, at the site."""
    data, tree = node.data, node.data.hierarchy
    penalty = None if delivered.lam is None else Penalty(node.gamma, delivered.lam, tree.sum_up(node.gamma))
    upper, learned = delivered.learned, None
    if upper is not None:
        components, upper_levels = Components.from_json(upper["components"]), Whole.from_json(upper["whole"])
        learned = node_learned(node, components, np.array(upper["covariance"]), upper_levels)
        learned = replace(learned, **uncertainty_from_json(upper, tree.n_clusters, data.n_terms))
    scale = node.find(Scale)
    fit = Fit(node.coefficients(), delivered.w, delivered.wbar, Convergence(**delivered.convergence))
    scaled = problem if scale is None else problem.scaled(scale)
    return assemble(scaled, Fitted(fit, penalty, learned), tree, data.rows_per_client, dropped=data.dropped)


def _check_message(body: Any) -> None:
    """Refuse everything but messages: nothing else may reach the rows."""
    for part in body.parts if isinstance(body, Message) else (body,):
        if not isinstance(part, Message) or isinstance(part, Batch) or (isinstance(part, SiteMessage) and part is not body):
            raise FederationError(f"A site does not answer {type(part).__name__!r}: it is not a message{SAME_VERSION}.")


def _check_set_once(body: Any, node: Node, problem: Problem) -> None:
    """Refuse to change penalties or scales during a run: sums at many penalties would say much about few clients."""
    held, scaled = node.find(SetGamma), node.find(Scale) is not None or not problem.spec.standardize
    for part in body.parts:
        if isinstance(part, SetGamma) and held is not None and not np.array_equal(part.gamma, held.gamma):
            raise FederationError("The penalties of a run cannot change after its first message with them; start a new run.")
        if isinstance(part, Standardise):
            if scaled:
                raise FederationError("The scales of a run can be set once, and only with standardize=True; start a new run.")
            scaled = True


def _out_of_step(asked: Envelope, run: SiteRun) -> Refusal | None:
    """Why a message is not the next one of its run; None if it is the next."""
    if isinstance(asked.body, Agree):
        if asked.epoch > run.epoch and asked.exchange == 0:
            return None
    elif (asked.epoch, asked.after) == (run.epoch, run.exchange) and asked.exchange > asked.after:
        return None
    got = f"it got message {asked.exchange} of start {asked.epoch}"
    here = f"this site is at message {run.exchange} of start {run.epoch} of the run, but {got}"
    if (asked.epoch, asked.exchange) <= (run.epoch, run.exchange):
        return Refusal("stale", here)
    return Refusal("behind", here)


def _refused(asked: Any, refusal: Refusal) -> Envelope:
    return replace(asked, body=refusal) if isinstance(asked, Envelope) else Envelope("", -1, -1, refusal)
