"""What a coordinator costs: 30,000 clients at 10 sites in this process, its own time per exchange and bytes per site.

    python benchmarks/bench_federation.py

The sites' own work is taken out: on a real network it is done by others. Prints the ratio of its time per exchange to the 50 ms
that an operator would not notice, and last the ratio of message sizes with fifteen times as many clients.
"""

from __future__ import annotations

import time

import numpy as np
import polars as pl

from covey.federation.operator.operate import run_fit
from covey.federation.operator.settings import RunSettings
from covey.federation.site.policy import Policy
from covey.federation.site.site import Site
from covey.federation.wire.transport import InProcess
from covey.problem.problem import Spec, resolve

CLUSTERS, ROWS, SITES = 100, 20, 10


class Timed(InProcess):
    """The time that sites take, apart."""

    seconds = 0.0

    def exchange(self, messages, timeout):
        start = time.perf_counter()
        came = super().exchange(messages, timeout)
        self.seconds += time.perf_counter() - start
        return came


def sites_of(clients: int, family: str) -> dict[str, Site]:
    rng = np.random.default_rng(0)
    n = clients * ROWS
    client = np.repeat(np.arange(clients), ROWS)
    x = rng.normal(size=(n, 2))
    margin = 0.3 + rng.normal(size=clients)[client] * 0.5 + x @ [0.5, -0.3]
    y = margin + rng.normal(size=n) if family == "gaussian" else rng.random(n) < 1 / (1 + np.exp(-margin))
    table = pl.DataFrame({"client": client, "cluster": client % CLUSTERS, "x1": x[:, 0], "x2": x[:, 1], "y": y})
    parts = {f"site{at}": table.filter(pl.col("client") // CLUSTERS % SITES == at) for at in range(SITES)}
    return {name: Site(name, lambda _, part=part: part, policy=Policy(1)) for name, part in parts.items()}


def run(clients: int, family: str, secure: bool) -> tuple[float, int]:
    """The coordinator's own milliseconds per exchange of the fit, and bytes up per site and exchange."""
    transport = Timed(sites_of(clients, family))
    spec = Spec(family=family, formula="y ~ x1 + x2", client="client", cluster="cluster", gamma=2.0)
    start = time.perf_counter()
    outcome = run_fit(transport, transport.sites(), resolve(spec), RunSettings(secure=secure))
    own = time.perf_counter() - start - transport.seconds
    fit = [each for each in outcome.exchanges if each.phase not in ("set-up", "finish")]
    return 1000 * own / len(outcome.exchanges), max(each.up for each in fit) // SITES


def main() -> None:
    run(2000, "gaussian", False)  # compiles
    slowest, sizes = 0.0, {}
    for family in ("gaussian", "bernoulli"):
        for secure in (False, True):
            for clients in (2000, 30_000):
                own, up = run(clients, family, secure)
                print(f"{family:10} secure={secure!s:5} {clients:>6} clients: {own:6.1f} ms a message, {up:,} bytes a site")
                sizes[family, secure, clients] = up
                slowest = max(slowest, own)
    print(f"slowest over 50 ms: {slowest / 50:.2f}")
    print(f"bytes with 30,000 over 2,000 clients: {max(sizes[f, s, 30_000] / sizes[f, s, 2000] for f, s, _ in sizes):.4f}")


if __name__ == "__main__":
    main()
