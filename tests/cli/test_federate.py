"""``covey federate --simulate``: costs, files and errors of a run."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from datetime import date
from typing import get_type_hints

import polars as pl
import pytest

from covey.cli.federate import RunOptions
from covey.datasets import load_radon
from covey.errors import CoveyError, DataError, FederationError
from covey.federation.operator.operate import costs, site_lines
from covey.federation.operator.settings import Members, RunSettings
from covey.federation.simulate import simulate_sites
from covey.problem.problem import Spec
from covey.records import decode, encode
from covey.solvers.direct.newton_node import NewtonStep
from covey.solvers.first_order.l2gd import L2gdMove
from covey.solvers.first_order.protocol import AskMeans, CheckGap

from .shell import inside

HOMES = load_radon().with_columns(high=pl.col("radon") > 4, count=pl.col("radon").round().cast(pl.Int64))
GIVEN = {"client": "county", "cluster": "state", "gamma": 10.0, "lam": 5.0}
K, D, SITES = 9, 2, 3  # clusters, terms, sites
UP, DOWN = D * (D + 1) // 2 + 2 * D + 6, D + 2  # numbers of a cluster, by the plan, of a direct solver
SOLVERS = {
    "sweep": {"formula": "log_radon ~ floor"},
    "newton": {"formula": "high ~ floor", "family": "bernoulli"},
    "counts": {"formula": "count ~ floor", "family": "poisson"},
    "l2gd": {"formula": "log_radon ~ floor", "solver": "l2gd", "max_iter": 1000},
    "al2sgd_plus": {"formula": "log_radon ~ floor", "solver": "al2sgd_plus", "max_iter": 1500},
}


def outcome(asked, **more):
    return simulate_sites(HOMES, Spec(**{**GIVEN, **asked}), SITES, **more).outcome


def labels(run):
    return [each.label for each in run.exchanges]


def made(run, phase):
    """The number of exchanges of a phase."""
    return sum(each.phase == phase for each in run.exchanges)


@pytest.mark.filterwarnings("ignore::covey.errors.ConvergenceWarning")  # randomised ones stop long before their end
@pytest.mark.parametrize("solver", SOLVERS)
def test_every_kind_of_exchange_is_listed_and_they_add_up(solver):
    run = outcome(SOLVERS[solver])
    head, *rows, last = [re.split(r"\s{2,}", line) for line in costs(run.exchanges)]
    assert [row[0] for row in rows] == list(dict.fromkeys(labels(run)))
    assert sum(int(row[1]) for row in rows) == int(last[1]) == len(run.exchanges)
    assert head[0] == "message"


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("solver", "exchanges", "halves"), [("sweep", 1, 1), ("newton", 7, 0), ("counts", 8, 1)])
def test_a_direct_solver_makes_the_exchanges_that_a_plan_counts(solver, exchanges, halves, masked):
    """A sweep is one exchange in the plan and two messages to each site: up, then down."""
    run = outcome(SOLVERS[solver], settings=RunSettings(secure=masked))
    assert run.model.convergence.exchanges == exchanges
    assert made(run, "fit") == exchanges + halves


@pytest.mark.filterwarnings("ignore::covey.errors.ConvergenceWarning")
@pytest.mark.parametrize("solver", ["l2gd", "al2sgd_plus"])
def test_a_randomised_solver_makes_the_exchanges_that_a_plan_counts(solver):
    run = outcome(SOLVERS[solver])
    ledger = run.model.ledger
    moves, checks = int(ledger.within.max()), ledger.checks
    assert labels(run).count(CheckGap.label) == labels(run).count(AskMeans.label) == checks
    assert made(run, "fit") >= moves + 2 * checks  # clusters that are asked at different times take more
    assert made(run, "measure") > 0


@pytest.mark.filterwarnings("ignore::covey.errors.ConvergenceWarning")
def test_learned_penalties_have_a_phase_of_their_own():
    run = outcome({**SOLVERS["l2gd"], "gamma": None, "lam": None, "tests": False, "max_iter": 100})
    assert made(run, "learn") > 0


@pytest.mark.filterwarnings("ignore::covey.errors.ConvergenceWarning")
def test_steps_that_only_measure_the_problem_are_not_those_of_the_fit():
    """For classes Newton goes near the minimiser first, where curvature is measured: its steps are not the algorithm's."""
    run = outcome({**SOLVERS["newton"], "solver": "one_coin", "max_iter": 100})
    steps = [each for each in run.exchanges if each.label == NewtonStep.label]
    assert steps
    assert {each.phase for each in steps} == {"measure"}


def test_the_report_names_sites_that_got_no_models():
    run = replace(outcome(SOLVERS["sweep"]), missed={"site2": "it is not connected"})
    assert site_lines(run) == [
        "Sites: site1, site2, site3",
        "site2 took part, but was lost at the end (it is not connected): it has no models of its clients from this fit",
    ]


@pytest.fixture
def folder(tmp_path):
    HOMES.write_parquet(tmp_path / "homes.parquet")
    return tmp_path


ASKED = ("log_radon ~ floor", "--client", "county", "--cluster", "state", "--gamma", "10", "--lam", "5")
LONG = ("federate", "homes.parquet", *ASKED, "--simulate", "3", "--solver", "l2gd", "--out", "fit")


def test_an_interrupt_ends_in_one_sentence(folder, monkeypatch):
    """Ctrl-C: one sentence and exit code 130, which says that nothing is kept of a simulation."""

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(L2gdMove, "at", interrupted)
    done = inside(*LONG, cwd=folder, check=False)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.splitlines()[-1] == "covey: Interrupted; the run has stopped."


SHORT = ("federate", "homes.parquet", *ASKED, "--simulate", "3")


def test_sites_of_an_earlier_run_go_and_a_users_folders_stay(folder):
    """covey deletes only model folders below OUT/sites."""
    inside(*SHORT[:-1], "4", "--out", "fit", cwd=folder)
    sites = folder / "fit" / "sites"
    mine, linked = sites / "mine", sites / "linked"
    mine.mkdir()
    (mine / "model.json").write_text('{"format": 2, "sha256": {}}')
    (mine / "thesis.txt").write_text("years of work")
    linked.symlink_to(sites / "site1")
    inside(*SHORT, "--out", "fit", cwd=folder)
    assert sorted(each.name for each in sites.iterdir()) == ["linked", "mine", "site1", "site2", "site3"]
    assert (mine / "thesis.txt").exists()


def test_json_states_the_privacy_of_a_fit(folder):
    pytest.importorskip("dp_accounting")
    told = json.loads(inside(*SHORT, "--epsilon", "4", "--json", cwd=folder).stdout)
    assert told["privacy"]["epsilon"] == pytest.approx(4.0)
    assert set(told["privacy"]) == {"epsilon", "delta", "clip", "noise", "releases"}
    assert json.loads(inside(*SHORT, "--json", cwd=folder).stdout)["privacy"] is None


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (("--retries", "-1"), ["'retries'", ">= 0", "-1"]),
        (("--timeout", "-5"), ["'timeout'", "> 0", "-5.0"]),
        (("--categories", '{"flor": ["a"]}'), ["'categories'", "'flor'", "did you mean 'floor'?"]),
    ],
)
def test_settings_out_of_range_are_one_sentence(folder, words, facts):
    for command in ((*SHORT, *words), ("federate", *ASKED, "--link", "link", *words)):
        done = inside(*command, cwd=folder, check=False)
        assert done.returncode == 2
        assert re.fullmatch(r"covey: [^\n]+\n", done.stderr)
        assert all(fact in done.stderr for fact in facts), done.stderr


def test_rows_are_those_of_the_file():
    lost = HOMES.with_columns(floor=pl.when(pl.int_range(pl.len()) == 1234).then(None).otherwise(pl.col("floor")))
    with pytest.raises(DataError, match=r"row 1234\b"):
        simulate_sites(lost, Spec(**GIVEN, formula="log_radon ~ floor"), 3)
    with pytest.raises(CoveyError, match="There is no column 'flor'; did you mean 'floor'"):
        simulate_sites(HOMES, Spec(**GIVEN, formula="log_radon ~ flor"), 3)


@pytest.mark.parametrize("name", ["", " ", ".", "..", "a/b", "a\\b", "a:b"])
def test_a_site_needs_a_name_that_can_be_a_folder(name):
    homes = HOMES.with_columns(place=pl.when(pl.col("state") == "MN").then(pl.lit(name)).otherwise(pl.lit("south")))
    with pytest.raises(DataError, match=re.escape(f"The site {name!r} cannot be the name of a site and its folder; ")):
        simulate_sites(homes, Spec(**GIVEN, formula="log_radon ~ floor"), "place")


def test_a_listed_site_that_is_not_there_is_noticed():
    states = frozenset(HOMES["state"])
    listed = Members(dict.fromkeys(("site1", "site2", "site3", "west"), states))
    with pytest.raises(FederationError, match=r"list of members has site 'west', which is not in 'site1', .*correct it"):
        outcome(SOLVERS["sweep"], settings=RunSettings(members=listed))


def test_penalties_of_clusters_that_are_dates_travel():
    gamma = {date(2024, 5, 12): 1.0, date(2024, 5, 13): math.inf}
    asked = Spec(**{**GIVEN, "gamma": gamma, "lam": [1.0, math.inf]})
    assert Spec.from_json(decode(encode(asked.to_json()))) == asked
    assert Spec.from_json(json.loads(json.dumps(asked.to_json()))) == asked


def test_the_help_names_the_defaults_that_hold():
    options = get_type_hints(RunOptions, include_extras=True)
    made = RunSettings.of({})
    for name, value in {"timeout": made.timeout, "retries": made.retries, "pause": made.pause, "wait": made.patience}.items():
        assert f"({value:g})." in options[name].__metadata__[0].help


def test_an_interrupted_deployment_says_so(folder, monkeypatch):
    def deploy(*_):
        raise KeyboardInterrupt("Interrupted; the run has stopped.")

    monkeypatch.setattr("covey.federation.flower.launch.deploy", deploy)
    done = inside("federate", *ASKED, "--link", "link", cwd=folder, check=False)
    assert (done.returncode, done.stderr) == (130, "covey: Interrupted; the run has stopped.\n")


@pytest.mark.filterwarnings("ignore::covey.errors.ConvergenceWarning")
def test_a_run_on_a_clock(tmp_path):
    """The fit in memory and the run across sites take the same iterations; an operator knows mean numbers of rows only."""
    load_radon().write_parquet(tmp_path / "homes.parquet")
    (tmp_path / "speeds.csv").write_text("cluster,latency\nMN,2\n")
    words = ["homes.parquet", "log_radon ~ floor", "--client", "county", "--cluster", "state", "--gamma", "10", "--lam", "5"]
    words += ["--solver", "l2gd", "--max-iter", "200", "--speeds", "speeds.csv"]
    here = json.loads(inside("fit", *words, "--json", cwd=tmp_path).stdout)["clock"]
    across = json.loads(inside("federate", "--simulate", "3", *words, "--json", cwd=tmp_path).stdout)["clock"]
    assert [row["iteration"] for row in here] == [row["iteration"] for row in across]
    assert all(row["asynchronous"] <= min(row["rounds"], row["lock_step"]) for row in [*here, *across])
    assert "on a clock, 200 iterations with checks take: asynchronous" in inside("fit", *words, cwd=tmp_path).stdout
    refused = inside("federate", "--link", "x", *words[1:], cwd=tmp_path, check=False)
    assert refused.returncode == 2
    assert "--speeds puts a simulated run on a clock" in refused.stderr
