"""Small federations for tests: tables split among sites, and faulty transports."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from queue import Empty, Queue

import numpy as np
import polars as pl

from covey.federation.operator.operate import run_fit
from covey.federation.operator.settings import RunSettings
from covey.federation.site.policy import Policy
from covey.federation.site.site import Site
from covey.federation.wire.codec import Envelope, Refusal
from covey.federation.wire.messages import SiteMessage
from covey.federation.wire.transport import InProcess, Transport
from covey.nodes.network import Message
from covey.problem.problem import Spec, resolve
from tests.fits import fit_table

FAMILIES = ("gaussian", "bernoulli", "poisson")


def table(seed: int, family: str = "gaussian", clients: int = 12, clusters: int = 3, rows: int = 8) -> pl.DataFrame:
    """Clients ``c0, c1, ...`` in clusters ``a, b, ...``, with a number ``x`` and a category ``z``."""
    rng = np.random.default_rng(seed)
    n = clients * rows
    client = np.repeat(np.arange(clients), rows)
    x, z = rng.normal(size=n), rng.integers(0, 3, size=n)
    own = rng.normal(size=(clients, 2)) * 0.5
    margin = 0.3 + own[client, 0] + (0.5 + own[client, 1]) * x + 0.3 * z
    y = {
        "gaussian": margin + rng.normal(size=n),
        "bernoulli": (rng.random(n) < 1 / (1 + np.exp(-margin))).astype(int),
        "poisson": rng.poisson(np.exp(np.clip(margin, -3, 3))),
    }[family]
    return pl.DataFrame(
        {
            "client": [f"c{i}" for i in client],
            "cluster": ["abcdefgh"[i % clusters] for i in client],
            "x": x,
            "z": [f"z{i}" for i in z],
            "y": y,
            "weight": rng.uniform(0.5, 2.0, size=n),
        }
    )


def spec(family: str = "gaussian", **settings) -> Spec:
    given = {"formula": "y ~ x + z", "client": "client", "cluster": "cluster", "gamma": 2.0, "lam": 1.5}
    return Spec(family=family, **{**given, **settings})


def split_by(frame: pl.DataFrame, owner: dict[str, str]) -> dict[str, pl.DataFrame]:
    """The rows of each site, given the site of each client."""
    where = frame["client"].replace_strict(owner)
    return {name: frame.filter(where == name) for name in sorted(set(owner.values()))}


def by_turns(frame: pl.DataFrame, sites: int) -> dict[str, pl.DataFrame]:
    """Two clients go to each site in turn, so that clusters are split over sites."""
    clients = frame["client"].unique(maintain_order=True).to_list()
    return split_by(frame, {client: f"s{at // 2 % sites}" for at, client in enumerate(clients)})


def spread(parts: dict[str, pl.DataFrame]) -> bool:
    """Whether every cluster is at two sites or more, as masks need it."""
    owners = pl.concat([part.select("cluster").unique() for part in parts.values()])
    return bool(owners["cluster"].is_duplicated().all())


def sites_of(parts: dict[str, pl.DataFrame], **settings) -> dict[str, Site]:
    """``settings`` are of the policy, or else of the site; in a ``home`` each site has its own folder, unless it is alone."""
    known = {part.name for part in fields(Policy)}
    policy = Policy(**{"minimum": 1, **{name: value for name, value in settings.items() if name in known}})
    others = {name: value for name, value in settings.items() if name not in known}
    home = others.pop("home", None)
    homes = {name: None if home is None else home / name if len(parts) > 1 else home for name in parts}
    return {name: Site(name, lambda _, part=part: part, policy, homes[name], **others) for name, part in parts.items()}


def kind(message: Envelope) -> str:
    """The kind of a message: "hello", "salt", "agree", "deliver" or "ask" to a site; "reply" or "refusal" from it."""
    if isinstance(message.body, Message):
        return message.body.label if isinstance(message.body, SiteMessage) else "ask"
    return "refusal" if isinstance(message.body, Refusal) else "reply"


def fit(sites: dict[str, Site], asked: Spec, transport=None, settings: RunSettings | None = None, **more):
    carrier = InProcess(sites) if transport is None else transport
    return run_fit(carrier, list(sites), resolve(asked), settings or RunSettings(retries=1, timeout=1.0), **more)


def in_memory(frame: pl.DataFrame, asked: Spec):
    return fit_table(frame, asked)


def thetas(sites: dict[str, Site], run: str) -> dict[str, np.ndarray]:
    """Every client's coefficients, from the site that has them, by its id or its pair of ids."""
    found = {}
    for site in sites.values():
        node = site.node(run)
        found.update(zip(node.data.hierarchy.identities.tolist(), node.coefficients(), strict=True))
    return found


def assert_same(outcome, sites, model, atol=1e-10):
    """The models of a run are those of a fit in memory."""
    np.testing.assert_allclose(outcome.model.w, model.w, rtol=0, atol=atol)
    np.testing.assert_allclose(outcome.model.wbar, model.wbar, rtol=0, atol=atol)
    found = thetas(sites, outcome.run)
    assert sorted(found) == sorted(model.hierarchy.identities.tolist())
    for client, theta in zip(model.hierarchy.identities.tolist(), model.theta, strict=True):
        np.testing.assert_allclose(found[client], theta, rtol=0, atol=atol)


class FaultyTransport(InProcess):
    """A transport with faults: ``fault(site, message, reply)`` may return another reply, or a Failure.

    It keeps all messages and replies.
    """

    def __init__(self, sites: dict[str, Site], fault: Callable | None = None) -> None:
        super().__init__(sites)
        self.inner, self.fault = InProcess(sites), fault
        self.messages: list[tuple[str, bytes]] = []
        self.replies: list[tuple[str, object]] = []

    def sites(self):
        return self.inner.sites()

    def exchange(self, messages, timeout):
        came = {}
        for site, message in messages.items():
            self.messages.append((site, message))
            reply = self.inner.exchange({site: message}, timeout)[site]
            if self.fault is not None:
                reply = self.fault(site, message, reply)
            self.replies.append((site, reply))
            came[site] = reply
        return came


class Threaded(Transport):
    """A thread for each site, which answers its messages one after the other; ``delay`` is in seconds by site."""

    def __init__(self, sites: dict[str, Site], delay: dict[str, float] | None = None) -> None:
        self.inner, self.delay = InProcess(sites), delay or {}
        self.came: Queue = Queue()
        self.asked: dict[str, int] = {}  # by site, the number of its last message
        self.threads = {name: ThreadPoolExecutor(1) for name in sites}

    def sites(self):
        return self.inner.sites()

    def push(self, messages, timeout):
        for site, message in messages.items():
            self.asked[site] = self.asked.get(site, 0) + 1
            self.threads[site].submit(self._answer, site, message, self.asked[site])

    def _answer(self, site, message, number):
        time.sleep(self.delay.get(site, 0.0))
        reply = self.inner.exchange({site: message}, 0.0)[site]
        self.came.put((site, number, reply))

    def pull(self, wait):
        try:
            site, number, reply = self.came.get(timeout=wait)
        except Empty:
            return {}
        return {site: reply} if number == self.asked[site] else {}
