"""A site: it answers letters from its own table, by what it allows.

It answers each exchange once, in order. Asked the same again it sends the same bytes; asked for an exchange it is not at, it
says where it is. Between two letters it may be put aside: all it needs is in its home folder, which nobody else can read.

    home/
      runs/      what it remembers of a run that is under way
      model/     the models of its own clients, once a run has ended; they do not leave the site
"""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import covey.fitting.fit  # noqa: F401 - registers the messages of the likelihood
from covey import __version__
from covey.errors import CoveyError, FederationError, did_you_mean
from covey.federation.privacy.sweeps import Draw
from covey.federation.site.budget import Budget, releases
from covey.federation.site.masks import joined_under_masks, masked, public_key, sealed_salts, with_key, with_salt
from covey.federation.site.models import keep_model
from covey.federation.site.policy import MINIMUM, Policy, check_models
from covey.federation.site.runs import RunStore, SiteRun
from covey.federation.site.table import check_design, counts, grouped, joined, profile_of, redacted, rows_digest, totals
from covey.federation.wire.agreement import Agree, Deliver, DrawSalt, Hello, Joined, Profile, SealedSalts, SiteMessage
from covey.federation.wire.checks import check_number
from covey.federation.wire.letters import Letter, Refusal
from covey.nodes.network import Batch, Message, Node, threads_for
from covey.problem.problem import Problem, Spec
from covey.records import decode, encode
from covey.solvers.registry import load_all
from covey.tables.rows import GroupedData, read_table
from covey.tables.scaling import Scale

load_all()  # registers the messages of all solvers

Read = Callable[[Spec], Any]
"""How a site reads its table, once it knows which columns hold ids."""

SETTINGS = ("data", "home", "minimum", "client", "columns", "secure", "epsilon", "epsilon_total", "delta")
"""Of a node, by name."""


class Site:
    """One site.

    Parameters
    ----------
    name : what the operator calls it
    read : how it reads its table
    policy : what it allows
    home : folder for what it remembers; None keeps it in this object, for simulation
    models : folder for its clients' models; by default in its home
    budget : what it lets itself spend of its clients' privacy, and has spent
    draw : where noise comes from; None is the system's randomness, and only simulations have another
    """

    def __init__(
        self,
        name: str,
        read: Read,
        policy: Policy | None = None,
        *,
        home: Path | None = None,
        models: Path | None = None,
        budget: Budget | None = None,
        draw: Draw | None = None,
    ) -> None:
        self.name, self.policy, self.home = name, Policy() if policy is None else policy, home
        self.models = home / "model" if models is None and home is not None else models
        self.budget = Budget() if budget is None else budget
        self._read, self._draw = read, draw
        self._runs = RunStore(home)
        self._nodes: dict[str, Node] = {}
        self._problems: dict[str, Problem] = {}

    def answer(self, letter: bytes) -> bytes:
        """The reply to one letter; what goes wrong is in it, in words that hold no data."""
        asked = None
        try:
            asked = decode(letter)
            if not isinstance(asked, Letter):
                raise FederationError("This is not a letter from a coordinator.")
            _check_message(asked.body)
            with self._runs.lock():
                return self._answer(asked, letter)
        except CoveyError as problem:
            return encode(_refusal(asked, Refusal("data", self.policy.sentence(problem, self.home))))
        except Exception as problem:  # a fault of the program; its own words could hold values of rows, so they stay here
            traceback.print_exc()
            return encode(_refusal(asked, Refusal("broken", f"{type(problem).__name__} in covey {__version__}")))

    def node(self, run: str) -> Node:
        """The node of a run, as it stands; for simulation and tests."""
        return self._nodes[run]

    def _answer(self, asked: Letter, letter: bytes) -> bytes:
        if isinstance(asked.body, Hello):
            return encode(replace(asked, body=self._introduce(asked, asked.body)))
        if isinstance(asked.body, DrawSalt):
            return encode(replace(asked, body=self._draw_salt(asked, asked.body)))
        run, digest = self._runs.load(asked.run), hashlib.sha256(letter).hexdigest()
        if (asked.epoch, asked.exchange) == (run.epoch, run.exchange) and run.digest == digest:
            return run.reply
        refusal = _out_of_step(asked, run)
        if refusal is not None:
            return encode(_refusal(asked, refusal))
        reply: Any
        if isinstance(asked.body, Agree):
            run, reply = self._join(asked, asked.body, run)
        elif isinstance(asked.body, Deliver):
            run, reply = self._finish(asked, asked.body, run)
        else:
            run, reply = self._work(asked, run)
        sent = encode(replace(asked, body=_receipt(reply) if asked.mute else reply))
        # A letter that fails has left everything as it was; this one has not failed.
        self._runs.save(asked.run, replace(run, epoch=asked.epoch, exchange=asked.exchange, digest=digest, reply=sent))
        return sent

    # Before the fit

    def _introduce(self, asked: Letter, hello: Hello) -> Profile:
        if hello.version != __version__:
            raise FederationError(f"This site runs covey {__version__}, the coordinator {hello.version}; install the same.")
        self.budget.admit(hello.private, asked.run, asked.epoch)
        draft = _received(hello.problem)
        self.policy.check_problem(draft)
        check_models(self.models)  # before the fit, not after it
        self.policy.check_secure(hello.secure)
        run = self._runs.load(asked.run)
        if hello.secure:
            run = with_key(run)
            self._runs.save(asked.run, run)
        key = public_key(run) if hello.secure else ""
        profile = profile_of(self._read(draft.spec), draft, key, self.policy.minimum)
        return profile if hello.private is None else redacted(profile)

    def _draw_salt(self, asked: Letter, wanted: DrawSalt) -> SealedSalts:
        run = with_salt(self._runs.load(asked.run))
        self._runs.save(asked.run, run)
        return sealed_salts(self.name, asked.run, run, wanted.keys)

    def _join(self, asked: Letter, agreed: Agree, run: SiteRun) -> tuple[SiteRun, Any]:
        if self.name not in agreed.roster:
            raise FederationError(f"Site {self.name!r} is not on the roster of this run.")
        self.budget.admit(agreed.private, asked.run, asked.epoch)
        problem = _received(agreed.problem)
        self.policy.check_problem(problem)
        check_design(problem)
        if (run.key or self.policy.secure) and not agreed.keys:
            raise FederationError("This run began under masks, and goes on under masks or not at all; start a new run.")
        if agreed.keys:
            run = joined_under_masks(self.name, asked.run, run, agreed)
        data = grouped(self._read(problem.spec), problem, agreed.cluster_ids())
        self.policy.check_clusters(data)
        run = replace(run, agreed=agreed, rows=rows_digest(data), node=None, rosters=(*run.rosters, agreed.roster))
        if agreed.private is not None:
            self.budget.remember(agreed.private, asked.run, asked.epoch, run.rows, again=asked.mute)
        self._nodes[asked.run], self._problems[asked.run] = self._fresh_node(data, problem), problem
        first = totals(data, standardize=problem.spec.standardize) if agreed.private is None else counts(data)
        shown = joined(data, run.salt if agreed.keys else agreed.salt, agreed, run.rows)
        return run, (shown, masked(self.name, asked, run, first))

    # The fit

    def _work(self, asked: Letter, run: SiteRun) -> tuple[SiteRun, Any]:
        """What the node does with a message; if that fails, the node is as it was."""
        node = self._node(asked.run, run)
        private = None if run.agreed is None else run.agreed.private
        noisy = releases(asked.body, private)
        before = node.data, node.snapshot()
        try:
            with threads_for(node.data), np.errstate(over="ignore", invalid="ignore"):
                reply = asked.body.at(node)
            if noisy and private is not None and not asked.mute:
                self.budget.charge(private, asked.run, asked.epoch, asked.exchange)
        except BaseException:
            node.data = before[0]
            node.restore(before[1])
            raise
        run = replace(run, node=node.snapshot())
        return run, masked(self.name, asked, run, reply)

    def _finish(self, asked: Letter, delivered: Deliver, run: SiteRun) -> tuple[SiteRun, None]:
        """Write the models of the site's clients; what is needed to send the same receipt again is all that is kept."""
        node = self._node(asked.run, run)
        if self.models is not None and run.agreed is not None:
            check_models(self.models)
            keep_model(node, self._problem(asked.run, run.agreed), delivered, self.models)
        return replace(run, key="", salt="", node=None), None

    # Its rows

    def _problem(self, name: str, agreed: Agree) -> Problem:
        """What was agreed on, read and checked once in a process."""
        if name not in self._problems:
            self._problems[name] = _received(agreed.problem)
        return self._problems[name]

    def _fresh_node(self, data: GroupedData, problem: Problem) -> Node:
        return Node(data, problem.loss, np.ones(data.n_clients), draw=self._draw)

    def _node(self, name: str, run: SiteRun) -> Node:
        """The node of a run; if this process has none, from the table and what was remembered."""
        if run.agreed is None:
            raise FederationError("This site has not joined the run.")
        if name not in self._nodes:
            problem = self._problem(name, run.agreed)
            data = grouped(self._read(problem.spec), problem, run.agreed.cluster_ids())
            if rows_digest(data) != run.rows:
                raise FederationError("The table has changed since the run began; put it back, or start a new run.")
            node = self._nodes[name] = self._fresh_node(data, problem)
            if run.node is not None:
                node.restore(run.node)
                scale = node.find(Scale)
                node.data = data if scale is None else scale.rows(data)
        return self._nodes[name]


def _received(plain: Mapping[str, Any]) -> Problem:
    """The problem of a message; its settings and every piece of its formula are checked."""
    try:
        return Problem.from_json(plain)
    except (AttributeError, KeyError, TypeError, ValueError) as problem:
        if isinstance(problem, CoveyError):
            raise
        raise FederationError("The problem that came with this message cannot be read; start a new run.") from None


def open_site(name: str, settings: Mapping[str, Any]) -> Site:
    """The site of a node's settings: ``data`` (its table), ``home`` (its folder), ``minimum`` (if not 3), what may be asked
    about (``client``, ``columns`` with commas, ``secure``), and what it may spend: ``epsilon``, ``epsilon_total``, ``delta``.
    """
    for unknown in (each for each in settings if each.replace("-", "_") not in SETTINGS):
        raise FederationError(
            f"The node of site {name!r} has an unknown setting {unknown!r}; {did_you_mean(unknown, SETTINGS)}"
        )
    for needed in ("data", "home"):
        if not settings.get(needed):
            raise FederationError(f"The node of site {name!r} has no setting {needed!r}; start it with {needed}=... .")
    path, home = str(settings["data"]), Path(str(settings["home"]))
    minimum, secure = settings.get("minimum", MINIMUM), settings.get("secure", False)
    check_number(f"'minimum' of site {name!r}", minimum, least=1, whole=True)
    if not isinstance(secure, bool):
        raise FederationError(f"The 'secure' of site {name!r} must be true or false. Got {secure!r} instead.")
    columns = [each.strip() for each in str(settings["columns"]).split(",")] if settings.get("columns") else None
    policy = Policy(minimum, settings.get("client"), columns, secure)
    read: Read = lambda spec: read_table(path, ids=[spec.client, spec.cluster])  # noqa: E731
    return Site(name, read, policy, home=home, budget=Budget.of(settings, home))


def _check_message(body: Any) -> None:
    """Refuse everything but messages: nothing else is asked to do anything with the rows."""
    parts = body.messages if isinstance(body, Batch) else (body,)
    for part in parts:
        if not isinstance(part, Message) or isinstance(part, Batch) or (isinstance(part, SiteMessage) and part is not body):
            raise FederationError(f"A site does not answer {type(part).__name__!r}: it is not a message to it.")


def _receipt(reply: Any) -> str | None:
    """What a site sends that catches up: no sum a second time, but when it joins, whether its rows are the same."""
    return reply[0].rows if isinstance(reply, tuple) and isinstance(reply[0], Joined) else None


def _out_of_step(asked: Letter, run: SiteRun) -> Refusal | None:
    """Why a letter is not the one that comes next; None if it is."""
    if isinstance(asked.body, Agree):
        if asked.epoch > run.epoch and asked.exchange == 0:
            return None
    elif (asked.epoch, asked.after) == (run.epoch, run.exchange) and asked.exchange > asked.after:
        return None
    here = f"this site is at exchange {run.exchange} of epoch {run.epoch}, the letter is for {asked.exchange} of {asked.epoch}"
    if (asked.epoch, asked.exchange) <= (run.epoch, run.exchange):
        return Refusal("stale", here, run.exchange)
    return Refusal("behind", here, run.exchange if asked.epoch == run.epoch else -1)


def _refusal(asked: Any, refusal: Refusal) -> Letter:
    return replace(asked, body=refusal) if isinstance(asked, Letter) else Letter("", -1, -1, refusal)
