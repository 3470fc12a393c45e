"""The node of a site: its table, what it remembers of a run, and how it answers letters.

It answers each exchange once, in order. Asked the same again it sends the same bytes; asked for an exchange it is not at, it
says where it is. Between two letters it may be put aside: all it needs is in its home folder, which nobody else can read.

    home/
      runs/      what it remembers of a run that is under way
      model/     the models of its own clients, once a run has ended; they do not leave the site
"""

from __future__ import annotations

import difflib
import hashlib
import secrets
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from covey import __version__
from covey._typing import Anything
from covey.errors import CoveyError, FederationError, FormulaError, ModelError, PenaltyError, SolverError, listing
from covey.federation.models import keep_model
from covey.federation.operator.agreement import Agree, DrawSalt, Hello, Joined
from covey.federation.privacy.masking import Keys, check_keys, check_roster, mask, open_sealed, pair_secret, seal
from covey.federation.privacy.sweeps import Draw
from covey.federation.site.budget import Budget, releases
from covey.federation.site.files import alone, own_folder, write_whole
from covey.federation.site.table import check_design, counts, grouped, joined, profile_of, totals, unspoken
from covey.federation.wire.letters import Letter, Refusal, split
from covey.model.files import check_target
from covey.nodes.node import Node, Snapshot
from covey.problem.problem import resolve
from covey.problem.spec import Spec
from covey.records import decode, encode
from covey.solvers.threads import threads_for
from covey.tables.rows import GroupedData, read_table
from covey.tables.scaling import Scale

_OF_SETTINGS = (FederationError, FormulaError, PenaltyError, SolverError)  # errors that are not about rows
MINIMUM = 3  # clients behind a sum, unless the site says otherwise

Read = Callable[[Spec], Any]
"""How a site reads its table, once it knows which columns hold ids."""


@dataclass
class Run:
    """What a site remembers of one run.

    Attributes
    ----------
    private, salt : its key, and the key of the clients' tags; in hexadecimal, only if sums are masked
    epochs : who took part in earlier starts of the fit, and now
    epoch, exchange : the last letter answered; ``digest`` of its bytes, and the ``reply``
    agreed, rows : what all sites agreed on, and a digest of the rows this was about
    node : where the node is
    """

    private: str = ""
    salt: str = ""
    epochs: tuple[tuple[str, ...], ...] = ()
    epoch: int = -1
    exchange: int = -1
    digest: str = ""
    reply: Anything = field(default_factory=lambda: np.empty(0, dtype=np.uint8))
    agreed: Agree | None = None
    rows: str = ""
    node: Snapshot | None = None


class Site:
    """One site.

    Parameters
    ----------
    name : what the operator calls it
    read : how it reads its table
    home : folder for what it remembers; None keeps it in this object, for simulation
    models : folder for its clients' models; by default in its home
    minimum : clients that must stand behind each sum that leaves it
    client, columns : the column of its clients, and all columns that may be asked about, as they are; None for any
    secure : whether it sends sums under masks only
    frank : whether sentences about its rows may leave it; in a simulation they may
    budget : what it lets itself spend of its clients' privacy
    draw : where noise comes from; None is the system's randomness, and only simulations have another
    """

    def __init__(
        self,
        name: str,
        read: Read,
        *,
        home: Path | None = None,
        models: Path | None = None,
        minimum: int = MINIMUM,
        client: str | None = None,
        columns: Sequence[str] | None = None,
        secure: bool = False,
        frank: bool = False,
        budget: Budget | None = None,
        draw: Draw | None = None,
    ) -> None:
        self.name, self.minimum, self.home, self.frank = name, minimum, home, frank
        self.client, self.columns, self.secure = client, columns, secure
        self.models = home / "model" if models is None and home is not None else models
        self.budget = Budget() if budget is None else budget
        self._read, self._draw = read, draw
        self._runs: dict[str, Run] = {}
        self._nodes: dict[str, Node] = {}

    def answer(self, letter: bytes) -> bytes:
        """The reply to one letter; what goes wrong is in it, in words that hold no data."""
        asked = None
        try:
            asked = decode(letter)
            if not isinstance(asked, Letter):
                raise FederationError("This is not a letter from a coordinator.")
            with self._alone():
                return self._answer(asked, letter)
        except CoveyError as problem:
            return encode(_refusal(asked, Refusal("data", self._fit_to_print(problem))))
        except Exception as problem:  # a fault of the program; its own words could hold values of rows, so they stay here
            traceback.print_exc()
            return encode(_refusal(asked, Refusal("broken", f"{type(problem).__name__} in covey {__version__}")))

    def _alone(self) -> AbstractContextManager[None]:
        """One process at a time: a transport may start one for every letter, and not notice that an older one still runs."""
        return alone(None if self.home is None else own_folder(self.home) / "lock")

    def node(self, run: str) -> Node:
        """The node of a run, as it stands; for simulation and tests."""
        return self._nodes[run]

    def _fit_to_print(self, problem: CoveyError) -> str:
        """A sentence that may leave the site: one about rows names clients and values, so it stays in the site's own log."""
        if self.frank or isinstance(problem, _OF_SETTINGS) or _of_schema(problem):
            return str(problem)
        print(f"covey: {problem}", file=sys.stderr)
        if self.home is not None:
            (self.home / "refusal.txt").write_text(f"{problem}\n")
        return "Its table cannot be used as it is; the site's own log (refusal.txt in its home) says which column and row."

    def _answer(self, asked: Letter, letter: bytes) -> bytes:
        if asked.kind == "hello":
            return encode(replace(asked, kind="reply", body=self._introduce(asked)))
        if asked.kind == "salt":
            return encode(replace(asked, kind="reply", body=self._draw_salt(asked)))
        run, digest = self._remember(asked.run), hashlib.sha256(letter).hexdigest()
        if (asked.epoch, asked.exchange) == (run.epoch, run.exchange) and run.digest == digest:
            return run.reply.tobytes()
        refusal = _out_of_step(asked, run)
        if refusal is not None:
            return encode(_refusal(asked, refusal))
        run = replace(run)  # a letter that fails leaves everything as it was
        reply = self._join(asked, run) if asked.kind == "agree" else self._work(asked, run)
        body = _receipt(reply) if asked.mute else reply
        sent = encode(replace(asked, kind="ready" if asked.mute else "reply", body=body))
        run.epoch, run.exchange, run.digest = asked.epoch, asked.exchange, digest
        run.reply = np.frombuffer(sent, dtype=np.uint8)
        self._put_aside(asked.run, run)
        return sent

    # Before the fit

    def _introduce(self, asked: Letter) -> Any:
        hello: Hello = asked.body
        if hello.version != __version__:
            raise FederationError(f"This site runs covey {__version__}, the coordinator {hello.version}; install the same.")
        self.budget.admit(hello.private, asked.run, asked.epoch)
        spec = Spec.from_json(hello.spec)
        self._check_columns(spec)
        self._check_models()  # before the fit, not after it
        if self.secure and not hello.secure:
            raise FederationError("This site sends its sums under masks only; run it with --secure.")
        key = ""
        if hello.secure:
            run = self._remember(asked.run)
            if not run.private:
                run.private = Keys.fresh().private.hex()
                self._put_aside(asked.run, run)
            key = Keys.fresh(bytes.fromhex(run.private)).public.hex()
        profile = profile_of(self._table(spec), spec, key, self.minimum)
        return profile if hello.private is None else unspoken(profile)

    def _draw_salt(self, asked: Letter) -> dict[str, str]:
        wanted: DrawSalt = asked.body
        run = self._remember(asked.run)
        run.salt = run.salt or secrets.token_hex(16)
        self._put_aside(asked.run, run)
        shared = self._shared(asked.run, run, wanted.keys)
        return {site: seal(key, bytes.fromhex(run.salt), f"salt for {site}").hex() for site, key in shared.items()}

    def _join(self, asked: Letter, run: Run) -> Any:
        agreed: Agree = asked.body
        if self.name not in agreed.roster:
            raise FederationError(f"Site {self.name!r} is not on the roster of this run.")
        self.budget.admit(agreed.private, asked.run, asked.epoch)
        self._check_columns(Spec.from_json(agreed.spec))
        check_design(agreed)
        if (run.private or self.secure) and not agreed.keys:
            raise FederationError("This run began under masks, and goes on under masks or not at all; start a new run.")
        if agreed.keys:
            self._check_masks(agreed, run)
            shared = self._shared(asked.run, run, agreed.keys)
            sealed = agreed.salt
            if sealed and not run.salt:
                maker, _, text = sealed.rpartition(":")
                run.salt = open_sealed(shared[maker], bytes.fromhex(text), f"salt for {self.name}").hex()
        data = grouped(self._table(Spec.from_json(agreed.spec)), agreed)
        self._check_minimum(data)
        run.agreed, run.rows = agreed, _digest(data)
        if agreed.private is not None:
            self.budget.remember(agreed.private, asked.run, asked.epoch, run.rows, again=asked.mute)
        run.node = None
        run.epochs = (*run.epochs, agreed.roster)
        spec = Spec.from_json(agreed.spec)
        self._nodes[asked.run] = Node(data, spec.loss, np.ones(data.n_clients), draw=self._draw)
        first = totals(data, standardize=spec.standardize) if agreed.private is None else counts(data)
        shown = joined(data, run.salt if agreed.keys else agreed.salt, agreed, run.rows)
        return (shown, self._sent(asked, run, first))

    def _check_masks(self, agreed: Agree, run: Run) -> None:
        check_keys({site: bytes.fromhex(key) for site, key in agreed.keys.items()})
        own = Keys.fresh(bytes.fromhex(run.private)).public.hex() if run.private else ""
        if agreed.keys.get(self.name) != own:
            raise FederationError(f"Site {self.name!r} no longer has its key of this run; start a new run.")
        if set(agreed.keys) != set(agreed.roster):
            raise FederationError("The keys that came with the roster are not those of its sites; start a new run.")
        check_roster(run.epochs, agreed.roster)

    def _check_columns(self, spec: Spec) -> None:
        """Refuse columns that the site does not let be asked about, and other clients than it has."""
        problem = resolve(spec)
        settled = problem.spec
        if self.client is not None and settled.client != self.client:
            raise FederationError(f"The clients of this site are in column {self.client!r}, not {settled.client!r}.")
        if self.columns is None:
            return
        if problem.formula is None:
            return
        named = {settled.client, settled.cluster, settled.weights, settled.offset} - {None}
        named |= {each.expression for each in problem.formula.factors if self._plain(each.expression, each.kind == "lookup")}
        odd = sorted(str(name) for name in named - {*self.columns, self.client})
        if odd:
            raise FederationError(f"This site does not answer about column {odd[0]!r}; ask about {listing(self.columns, 8)}.")

    def _plain(self, name: str, plain: bool) -> bool:
        """Columns as they are: an expression could pick out single rows."""
        if not plain:
            raise FederationError(f"This site answers about columns as they are, not about {name!r}; leave it out.")
        return True

    def _check_models(self) -> None:
        try:
            if self.models is not None:
                check_target(self.models)
        except ModelError as problem:
            print(f"covey: {problem}", file=sys.stderr)
            raise FederationError(
                "The folder for its clients' models holds other things or cannot be written; the site's own log says more."
            ) from None

    def _check_minimum(self, data: GroupedData) -> None:
        sizes = data.hierarchy.sizes
        few = np.flatnonzero((sizes > 0) & (sizes < self.minimum))
        if len(few):
            j = int(few[0])
            raise FederationError(
                f"There are fewer clients of cluster {data.hierarchy.cluster_ids[j]!r} here than the {self.minimum} that this "
                "site wants behind each sum it sends; lower its minimum, or leave the cluster out."
            )

    # The fit

    def _work(self, asked: Letter, run: Run) -> Any:
        node = self._node(asked.run, run)
        if asked.kind == "deliver":
            if self.models is not None and run.agreed is not None:
                self._check_models()
                keep_model(node, run.agreed, asked.body, self.models)
            # The run is over: what is needed to send the same receipt again is all that is kept of it.
            run.private, run.salt, run.node = "", "", None
            return None
        if asked.kind != "ask":
            raise FederationError(f"A site does not know letters of kind {asked.kind!r}.")
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
        run.node = node.snapshot()
        return self._sent(asked, run, reply)

    def _sent(self, asked: Letter, run: Run, reply: Any) -> Any:
        """A reply as it leaves: under masks, if that was agreed."""
        agreed = run.agreed
        if agreed is None or not agreed.keys or reply is None:
            return reply
        # The one at the end is a proof: over all sites these add up to their number, if the masks cancel.
        skeleton, numbers = split((_without_least(reply), 1.0))
        about = None if asked.kind == "agree" else asked.body  # what is agreed holds a seal of this site's own
        question = hashlib.sha256(encode(replace(asked, mute=False, body=about))).digest()
        shared = self._shared(asked.run, run, agreed.keys)
        return (skeleton, mask(numbers, self.name, shared, asked.epoch, asked.exchange, question))

    def _shared(self, run_name: str, run: Run, keys: Mapping[str, str]) -> dict[str, bytes]:
        own = Keys.fresh(bytes.fromhex(run.private))
        return {site: pair_secret(own, bytes.fromhex(key), run_name) for site, key in keys.items() if site != self.name}

    # What it remembers

    def _table(self, spec: Spec) -> Any:
        return self._read(resolve(spec).spec)

    def _node(self, name: str, run: Run) -> Node:
        if run.agreed is None:
            raise FederationError("This site has not joined the run.")
        if name not in self._nodes:
            spec = Spec.from_json(run.agreed.spec)
            data = grouped(self._table(spec), run.agreed)
            if _digest(data) != run.rows:
                raise FederationError("The table has changed since the run began; put it back, or start a new run.")
            node = self._nodes[name] = Node(data, spec.loss, np.ones(data.n_clients), draw=self._draw)
            if run.node is not None:
                node.restore(run.node)
                scale = node.find(Scale)
                node.data = data if scale is None else scale.rows(data)
        return self._nodes[name]

    def _remember(self, name: str) -> Run:
        if not name.isalnum():
            raise FederationError(f"A run's name is letters and digits; got {name[:40]!r}.")
        if name not in self._runs:
            file = None if self.home is None else self.home / "runs" / f"{name}.state"
            self._runs[name] = Run(**decode(file.read_bytes())) if file is not None and file.exists() else Run()
        return self._runs[name]

    def _put_aside(self, name: str, run: Run) -> None:
        self._runs[name] = run
        if self.home is None:
            return
        state = {part.name: getattr(run, part.name) for part in fields(run)}
        write_whole(own_folder(self.home / "runs") / f"{name}.state", encode(state))


def open_site(name: str, settings: Mapping[str, Any]) -> Site:
    """The site of a node's settings: ``data`` (its table), ``home`` (its folder), ``minimum`` (if not 3), what may be asked
    about (``client``, ``columns`` with commas, ``secure``), and what it may spend: ``epsilon``, ``epsilon_total``, ``delta``.
    """
    odd = [each for each in settings if each.replace("-", "_") not in _SETTINGS]
    if odd:
        raise FederationError(f"The node of site {name!r} has a setting {odd[0]!r} that is none; {_near(odd[0])}")
    for needed in ("data", "home"):
        if not settings.get(needed):
            raise FederationError(f"The node of site {name!r} has no setting {needed!r}; start it with {needed}=... .")
    path = str(settings["data"])
    home = Path(str(settings["home"]))
    minimum = settings.get("minimum", MINIMUM)
    if not isinstance(minimum, int) or minimum < 1:
        raise FederationError(f"The 'minimum' of site {name!r} must be a whole number >= 1. Got {minimum!r} instead.")
    read: Read = lambda spec: read_table(path, ids=[spec.client, spec.cluster])  # noqa: E731
    if not isinstance(settings.get("secure", False), bool):
        raise FederationError(f"The 'secure' of site {name!r} must be true or false. Got {settings['secure']!r} instead.")
    columns = [each.strip() for each in str(settings["columns"]).split(",")] if settings.get("columns") else None
    about: dict[str, Any] = {"client": settings.get("client"), "columns": columns, "secure": bool(settings.get("secure"))}
    return Site(name, read, home=home, minimum=minimum, budget=Budget.of(settings, home), **about)


_SETTINGS = ("data", "home", "minimum", "client", "columns", "secure", "epsilon", "epsilon_total", "delta")


def _near(name: str) -> str:
    near = difflib.get_close_matches(name, _SETTINGS, n=1)
    return f"did you mean {near[0]!r}?" if near else f"there are {listing(_SETTINGS, 10)}."


def _receipt(reply: Any) -> str | None:
    """What a site says that catches up: no sum a second time, but when it joins, whether its rows are the same."""
    return reply[0].rows if isinstance(reply, tuple) and isinstance(reply[0], Joined) else None


def _out_of_step(asked: Letter, run: Run) -> Refusal | None:
    """Why a letter is not the one that comes next; None if it is."""
    if asked.kind == "agree":
        if asked.epoch > run.epoch and asked.exchange == 0:
            return None
    elif (asked.epoch, asked.after) == (run.epoch, run.exchange) and asked.exchange > asked.after:
        return None
    here = f"this site is at exchange {run.exchange} of epoch {run.epoch}, the letter is for {asked.exchange} of {asked.epoch}"
    if (asked.epoch, asked.exchange) <= (run.epoch, run.exchange):
        return Refusal("stale", here, run.exchange)
    return Refusal("behind", here, run.exchange if asked.epoch == run.epoch else -1)


def _refusal(asked: Any, refusal: Refusal) -> Letter:
    if not isinstance(asked, Letter):
        return Letter("", -1, -1, "refusal", refusal)
    return replace(asked, kind="refusal", body=refusal)


def _of_schema(problem: CoveyError) -> bool:
    """Whether a sentence is about what columns there are, and not about what is in them."""
    return str(problem).startswith(("There is no column", "The table has no rows", "There is no file"))


def _without_least(reply: Any) -> Any:
    """A reply without bounds that are the least over clients: they do not add, so no mask could hide them."""
    if is_dataclass(reply) and not isinstance(reply, type):
        least = {part.name: 0.0 for part in fields(reply) if part.metadata.get("least")}
        return replace(reply, **least)
    return reply


def _digest(data: GroupedData) -> str:
    digest = hashlib.sha256()
    tree = data.hierarchy
    for array in (data.X, data.y, data.weights, data.offset, data.client_ptr, tree.cluster_ptr):
        digest.update(b"none" if array is None else np.ascontiguousarray(array).tobytes())
    digest.update(repr((tree.client_ids.to_list(), tree.cluster_ids.to_list())).encode())
    return digest.hexdigest()
