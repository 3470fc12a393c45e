"""All studies by name, in the order of ``covey reproduce``."""

from __future__ import annotations

from pathlib import Path

from covey.errors import one_of
from covey.reproduce import communication, donors, limits, robustness, simulation
from covey.reproduce.mailings import Mailing, from_tables, karlan_list, simulated
from covey.reproduce.paper import CLIENTS
from covey.reproduce.study import Say, Study, silent

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
        study = _DRAWN[name](seed=seed, quick=quick, say=say)
    elif name == "donors":
        called, mailing = _mailing(data, tables, seed, quick, say)
        study = donors.study(mailing, name=called, seed=seed, quick=quick, say=say)
    else:
        raise one_of("study", name, STUDIES)
    return study


def _mailing(
    data: Path | None, tables: tuple[Path, Path, Path] | None, seed: int, quick: bool, say: Say
) -> tuple[str, Mailing]:
    if data is not None:
        return "donors-karlan-list", karlan_list(data)
    if tables is not None:
        return "donors-tables", from_tables(*tables)
    zips, appeals = (1500, 150_000) if quick else (CLIENTS, APPEALS)
    say("drawing appeals and gifts", 0, 1)
    drawn = simulated(zips=zips, appeals=appeals, seed=seed)
    say("drawing appeals and gifts", 1, 1)
    return "donors", drawn
