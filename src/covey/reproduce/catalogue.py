"""The studies of ``covey reproduce`` by name, in the order in which ``covey reproduce all`` runs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from covey.errors import one_of
from covey.reproduce import communication, donors, limits, robustness, simulation
from covey.reproduce.mailings import from_tables, karlan_list, simulated
from covey.reproduce.study import Say, Study, silent

STUDIES = ("simulation", "donors", "limits", "communication", "robustness")
_WITHOUT_DATA = {
    "simulation": simulation.study,
    "limits": limits.study,
    "communication": communication.study,
    "robustness": robustness.study,
}


def run(
    name: str,
    *,
    seed: int = 0,
    quick: bool = False,
    data: Path | None = None,
    tables: tuple[Path, Path, Path] | None = None,
    say: Say = silent,
) -> Study:
    """Run one study.

    Parameters
    ----------
    name : one of ``STUDIES``
    seed : determines all random draws
    quick : smaller problems and fewer runs
    data : for donors, the file of the public mailing experiment (Karlan and List 2007)
    tables : for donors, files of appeals, gifts and ZIP codes; without ``data`` and ``tables`` the tables are simulated
    say : receives progress

    Returns
    -------
    Study

    Examples
    --------
    >>> study = run("limits", quick=True)
    >>> study.table("gls")["largest relative difference"].max() < 1e-9
    True
    """
    common: dict[str, Any] = {"seed": seed, "quick": quick, "say": say}
    if name not in STUDIES:
        raise one_of("study", name, STUDIES)
    if name != "donors":
        return _WITHOUT_DATA[name](**common)
    if data is not None:
        mailing = karlan_list(data)
    elif tables is not None:
        mailing = from_tables(*tables)
    else:
        say("simulating appeals and gifts", 0, 1)
        mailing = simulated(seed=seed, **({"zips": 1500, "appeals": 150_000} if quick else {}))
        say("simulating appeals and gifts", 1, 1)
    return donors.study(mailing, **common)
