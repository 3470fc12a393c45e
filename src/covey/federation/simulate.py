"""All sites on this machine: a table is split among them, and they fit it as real sites would."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from covey.errors import CoveyError, DataError, FederationError, listing, whole
from covey.federation.operator.operate import OnLoss, Outcome, run_fit
from covey.federation.operator.settings import RunSettings
from covey.federation.privacy.differential import seeded_normal
from covey.federation.site.policy import Policy
from covey.federation.site.site import Site
from covey.federation.wire.transport import InProcess
from covey.fitting.planning import RunClock, clock_run
from covey.model.model import Model
from covey.problem.problem import Spec, as_frame, resolve
from covey.problem.rows import read_rows
from covey.tables.design import column
from covey.tree.hierarchy import as_labels, encode, lookup

if TYPE_CHECKING:
    from narwhals.typing import IntoDataFrame


@dataclass(frozen=True)
class SimulatedRun:
    """A run whose sites are all in this process.

    Attributes
    ----------
    outcome : Outcome
        The result of the run: the model of the clusters, the messages and the roster.
    sites : dict of Site
        The sites by name. They hold the models of their clients.
    """

    outcome: Outcome
    sites: Mapping[str, Site]

    def clock(self, speeds: IntoDataFrame | None = None, **network: float) -> RunClock:
        """How long this run takes if its clusters have these speeds; the parameters of :func:`covey.plan` for a network."""
        return clock_run(self.outcome.model, speeds=speeds, **network)

    def difference(self, model: Model) -> float:
        """The largest difference between a coefficient of this run, at any level, and that of a model fitted in memory."""
        own = self.outcome.model
        apart = [np.abs(own.w - model.w).max(), np.abs(own.wbar - model.wbar).max()]
        for name in self.outcome.roster:
            node = self.sites[name].node(self.outcome.run)
            tree = node.data.hierarchy
            place = model.hierarchy.find(
                tree.client_ids, lookup(tree.cluster_of_client, model.hierarchy.cluster_ids, "cluster")
            )
            if (place < 0).any():
                raise DataError(f"The model does not have all clients of site {name!r}; fit it to the same rows.")
            apart.append(np.abs(node.coefficients() - model.theta[place]).max())
        return float(max(apart))


def simulate_sites(
    table: IntoDataFrame,
    spec: Spec,
    sites: int | str = 3,
    *,
    settings: RunSettings | None = None,
    minimum: int = 1,
    models: str | Path | None = None,
    out: str | Path | None = None,
    on_loss: OnLoss = "stop",
    noise_seed: int | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> SimulatedRun:
    """Split the clients of a table among sites on this machine, and fit across them.

    Parameters
    ----------
    table : dataframe (polars, pandas, pyarrow)
        All rows.
    spec : Spec
        What is fitted. It must name the clients, by ``client`` or by bars in the formula.
    sites : int or str
        The number of sites, to which the clients are assigned in turn; or the column that names the site of each row.
    settings : RunSettings, optional
        Settings of the run: timeout and retries, masks, allow-list, differential privacy.
    minimum : int
        The least number of clients in each sum of a site: in each cluster, and for each term in it. A private run checks
        only the clients of each cluster, and those of each category at the whole site. A site with fewer refuses the run,
        which then ends.
    models : str or Path, optional
        Folder in which each site writes the models of its clients.
    out : str or Path, optional
        Folder for the models of the clusters and the global model.
    on_loss : {"stop", "continue"}
        What to do if a site is lost.
    noise_seed : int, optional
        Seed of the noise of a private fit. By default the noise comes from the system's randomness.
    say : callable
        Called with a line of text about the current step.

    Returns
    -------
    SimulatedRun
        The outcome of the run, and its sites.

    Examples
    --------
    >>> from covey.datasets import load_radon
    >>> spec = Spec(formula="log_radon ~ floor", client="county", cluster="state", gamma=10.0)
    >>> run = simulate_sites(load_radon(), spec, sites=3)
    >>> run.outcome.roster, [message.label for message in run.outcome.exchanges]
    (('site1', 'site2', 'site3'), ['hello', 'agree', 'sweep up', 'sweep down', 'deliver'])
    """
    draft = resolve(spec)
    models, out = (None if folder is None else Path(folder) for folder in (models, out))
    whole("minimum", minimum, least=1)
    settings = RunSettings() if settings is None else settings
    parts = split_among_sites(table, draft.spec, sites)
    absent = [name for name in settings.members.sites if name not in parts]
    if absent:
        raise FederationError(f"The list of members has site {absent[0]!r}, which is not in {listing(parts, 5)}; correct it.")
    simulated = {
        name: Site(
            name,
            lambda _, part=part: part,  # type: ignore[misc]
            Policy(minimum, share_row_errors=True),
            models=None if models is None else models / name,
            draw=None if noise_seed is None else seeded_normal(noise_seed, at),
        )
        for at, (name, part) in enumerate(parts.items())
    }
    try:
        outcome = run_fit(InProcess(simulated), list(simulated), draft, settings, out=out, on_loss=on_loss, say=say)
    except CoveyError:
        read_rows(table, draft)  # an error about a row of a site becomes one about a row of the whole table
        raise
    return SimulatedRun(outcome, simulated)


def split_among_sites(table: Any, spec: Spec, sites: int | str) -> dict[str, Any]:
    """The rows of each site, by name."""
    frame = as_frame(table)
    if spec.client is None:
        raise DataError("Say which column holds the clients: client=, or a formula with (terms | cluster/client).")
    if isinstance(sites, str):
        labels, codes = encode(column(frame, sites), "site")
        names = [str(label) for label in labels.to_list()]
        odd = [name for name in names if not name.strip(". ") or set(name) & set("/\\:")]
        if odd:
            raise DataError(f"The site {odd[0]!r} cannot be the name of a site and its folder; rename it in column {sites!r}.")
    else:
        ids = as_labels(column(frame, spec.client), "client")
        if spec.na == "drop":  # a row without a client is at some site too
            ids = ids.fill_null(ids.drop_nulls().first())
        _, codes = encode(ids, "client")
        n_clients = int(codes.max()) + 1
        if not 1 <= sites <= n_clients:
            raise DataError(f"'sites' must be from 1 to {n_clients}, the number of clients. Got {sites!r} instead.")
        names, codes = [f"site{at + 1:0{len(str(sites))}}" for at in range(sites)], codes % sites
    return {name: frame[np.flatnonzero(codes == at)].to_native() for at, name in enumerate(names)}
