"""All sites on this machine: a table split among them, and the same fit as across real ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import narwhals as nw
import numpy as np

from covey._typing import Ints
from covey.errors import CoveyError, DataError, FederationError, listing
from covey.federation.operator.operate import OnLoss, Outcome, run_fit
from covey.federation.operator.settings import RunSettings
from covey.federation.privacy.sweeps import seeded_normal
from covey.federation.site.policy import Policy
from covey.federation.site.site import Site
from covey.federation.wire.checks import check_number
from covey.federation.wire.transport import InProcess
from covey.model.model import Model
from covey.problem.problem import Problem, Spec, as_frame, read_rows, resolve
from covey.tables.design import column
from covey.tree.hierarchy import encode, lookup


@dataclass(frozen=True)
class SimulatedRun:
    """A run with all its sites at hand."""

    outcome: Outcome
    sites: Mapping[str, Site]

    def difference(self, model: Model) -> float:
        """The largest difference of any coefficient, at any level, from those of a model fitted in memory."""
        own = self.outcome.model
        apart = [np.abs(own.w - model.w).max(), np.abs(own.wbar - model.wbar).max()]
        for name in self.outcome.roster:
            node = self.sites[name].node(self.outcome.run)
            tree = node.data.hierarchy
            place = lookup(tree.client_ids, model.hierarchy.client_ids, "client")
            if (place < 0).any():
                raise DataError("The model has not the same clients as the sites; fit it to the same rows.")
            apart.append(np.abs(node.coefficients() - model.theta[place]).max())
        return float(max(apart))


def simulate(
    table: Any,
    spec: Spec,
    sites: int | str = 3,
    *,
    settings: RunSettings | None = None,
    minimum: int = 1,
    models: Path | None = None,
    journal: Path | None = None,
    out: Path | None = None,
    on_loss: OnLoss = "stop",
    noise_seed: int | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> SimulatedRun:
    """Split the clients of a table among sites, and fit across them.

    Parameters
    ----------
    sites : how many there are, each client at one of them by turns; or the column that says where a row is
    settings : what the operator decides
    minimum : clients that a site wants in each sum it sends
    models : folder in which each site writes the models of its clients
    journal : as for :func:`.run_fit`; under masks and with noise there is none, since the sites' keys
        and their account of what they have released end with the process
    noise_seed : of the noise of a private fit, for the same noise each time; by default it is the system's

    >>> from covey.datasets import load_radon
    >>> spec = Spec(formula="log_radon ~ floor", client="county", cluster="state", gamma=10.0)
    >>> run = simulate(load_radon(), spec, sites=3)
    >>> run.outcome.roster, [exchange.label for exchange in run.outcome.exchanges]
    (('site1', 'site2', 'site3'), ['hello', 'agree', 'sweep up', 'sweep down', 'deliver'])
    """
    draft = resolve(spec)
    check_number("'minimum' of clients in a sum", minimum, least=1, whole=True, error=DataError)
    settings = RunSettings() if settings is None else settings
    parts = split_among_sites(table, draft.spec, sites)
    absent = [name for name in settings.members.sites if name not in parts]
    if absent:
        raise FederationError(
            f"The list of members has the site {absent[0]!r}, which is not here; correct it: there are {listing(parts, 5)}."
        )
    at = {
        name: Site(
            name,
            _reads(part),
            Policy(minimum, share_row_errors=True),
            models=None if models is None else models / name,
            draw=None if noise_seed is None else seeded_normal(noise_seed, at),
        )
        for at, (name, part) in enumerate(parts.items())
    }
    kept = None if settings.secure or settings.private is not None else journal
    try:
        outcome = run_fit(InProcess(at), list(at), draft, settings, journal=kept, out=out, on_loss=on_loss, say=say)
    except CoveyError:
        _check_whole(table, draft)
        raise
    return SimulatedRun(outcome, at)


def _check_whole(table: Any, draft: Problem) -> None:
    """Refuse rows by their numbers in the whole table: a site knows those of its own part only."""
    try:
        read_rows(table, draft)
    except CoveyError as problem:
        raise problem from None


def split_among_sites(table: Any, spec: Spec, sites: int | str) -> dict[str, Any]:
    """The rows of each site, by name."""
    frame = as_frame(table)
    if spec.client is None:
        raise DataError("Say which column holds the clients: client=, or a formula with (terms | cluster/client).")
    if isinstance(sites, str):
        names, codes = encode(column(frame, sites), "site")
        odd = [name for name in map(str, names.to_list()) if not name.strip(". ") or set(name) & set("/\\:")]
        if odd:
            raise DataError(f"The site {odd[0]!r} cannot be the name of a site and its folder; rename it in column {sites!r}.")
        return {str(name): _rows(frame, codes == at) for at, name in enumerate(names.to_list())}
    _, codes = encode(column(frame, spec.client), "client")
    if not 1 <= sites <= int(codes.max()) + 1:
        raise DataError(f"{sites!r} sites cannot share {int(codes.max()) + 1} clients; give from 1 to that many.")
    width = len(str(sites))
    return {f"site{at + 1:0{width}}": _rows(frame, codes % sites == at) for at in range(sites)}


def _rows(frame: Any, keep: Ints) -> Any:
    return frame[np.flatnonzero(keep)].to_native() if isinstance(frame, nw.DataFrame) else frame


def _reads(part: Any) -> Callable[[Spec], Any]:
    return lambda _: part
