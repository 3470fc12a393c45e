"""All studies by name, in the order of ``covey reproduce``."""

from __future__ import annotations

from pathlib import Path

from covey.errors import one_of
from covey.experiments import communication, donors, limits, robustness, simulation
from covey.experiments.mailings import from_tables, karlan_list, simulated
from covey.experiments.paper import CLIENTS
from covey.experiments.study import Say, Study, silent

APPEALS = 5_000_000  # what the paper's quartiles of accuracy, with 6% success, say of its size

_DRAWN = {
    "simulation": simulation.study,
    "limits": limits.study,
    "communication": communication.study,
    "robustness": robustness.study,
}
STUDIES = ("simulation", "donors", "limits", "communication", "robustness")


def run(
    name: str,
    *,
    seed: int = 0,
    quick: bool = False,
    data: Path | None = None,
    tables: tuple[Path, Path, Path] | None = None,
    say: Say = silent,
) -> Study:
    """One study; for donors from the public experiment (``data``), from tables of one's own, or simulated.

    >>> study = run("limits", quick=True)
    >>> study.table("gls")["largest relative difference"].max() < 1e-9
    True
    """
    if name in _DRAWN:
        return _DRAWN[name](seed=seed, quick=quick, say=say)
    if name != "donors":
        raise one_of("study", name, STUDIES)
    if data is not None:
        return donors.study(karlan_list(data), name="donors-karlan-list", seed=seed, quick=quick, say=say)
    if tables is not None:
        return donors.study(from_tables(*tables), name="donors-tables", seed=seed, quick=quick, say=say)
    say("drawing appeals and gifts", 0, 1)
    zips, appeals = (1500, 150_000) if quick else (CLIENTS, APPEALS)
    return donors.study(simulated(zips=zips, appeals=appeals, seed=seed), seed=seed, quick=quick, say=say)
