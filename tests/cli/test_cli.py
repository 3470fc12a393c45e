"""The command line: results, JSON, one-line errors with exit code 2, no progress in pipes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from io import StringIO

import numpy as np
import polars as pl
import pytest
from rich.console import Console

from covey import HierarchicalRegressor
from covey.cli import app
from covey.cli._options import working
from covey.solvers import registry
from tests.test_bad_input import CASES

from .shell import COVEY, inside, run


@pytest.fixture(scope="module")
def folder(tmp_path_factory, homes):
    place = tmp_path_factory.mktemp("shell")
    homes.write_parquet(place / "homes.parquet")
    homes.with_columns(high=pl.when(pl.col("radon") > 4).then(pl.lit("yes")).otherwise(pl.lit("no"))).write_csv(
        place / "homes.csv"
    )
    run("fit", "homes.parquet", "log_radon ~ floor", "--client", "county", "--cluster", "state", "--out", "model", cwd=place)
    return place


def test_fit_compares_prints_and_writes(folder):
    done = run(
        "fit", "homes.csv", "log_radon ~ floor", "--client", "county", "--cluster", "state", "--penalty", "cv", cwd=folder
    )
    assert done.stderr == ""
    for part in (
        "single-model",
        "locally-trained",
        "single-cluster",
        "hierarchical",
        "470 clients (county) in 9 clusters (state)",
    ):
        assert part in done.stdout
    written = sorted(path.name for path in (folder / "model").iterdir())
    assert written == ["clients.parquet", "clusters.parquet", "model.json", "sums.parquet"]


def test_fit_json(folder):
    done = run(
        "fit",
        "homes.csv",
        "high ~ floor",
        "--client",
        "county",
        "--cluster",
        "state",
        "--family",
        "bernoulli",
        "--json",
        cwd=folder,
    )
    document = json.loads(done.stdout)
    assert document["clients"] == 470
    assert document["convergence"]["gap"] < 1e-8
    errors = document["held_out"]["errors"]
    assert errors["hierarchical"] < min(errors["single-model"], errors["locally-trained"])


def test_predict_to_stdout_and_to_files(folder, homes):
    done = run("predict", "model", "homes.parquet", cwd=folder)
    table = pl.read_csv(done.stdout.encode())
    assert table.columns == ["state", "county", "prediction", "answered_by"]
    assert len(table) == len(homes)
    assert set(table["answered_by"]) == {"client"}
    run("predict", "model", "homes.parquet", "--level", "cluster", "--out", "p.parquet", cwd=folder)
    assert set(pl.read_parquet(folder / "p.parquet")["answered_by"]) == {"cluster"}
    rows = run("predict", "model", "homes.parquet", "--json", cwd=folder).stdout.splitlines()
    assert json.loads(rows[0])["prediction"] == pytest.approx(table["prediction"][0])


def test_predict_classes(folder):
    inside(
        "fit",
        "homes.csv",
        "high ~ floor",
        "--client",
        "county",
        "--family",
        "bernoulli",
        "--holdout",
        "0",
        "--out",
        "high",
        cwd=folder,
    )
    table = pl.read_csv(inside("predict", "high", "homes.csv", cwd=folder).stdout.encode())
    assert set(table["prediction"]) == {"yes", "no"}
    assert ((table["probability"] > 0.5) == (table["prediction"] == "yes")).all()


def test_show(folder):
    text = inside("show", "model", cwd=folder).stdout
    assert "Hierarchical linear model: log_radon ~ floor" in text
    assert "AZ" in text
    document = json.loads(inside("show", "model", "--level", "client", "--json", cwd=folder).stdout)
    assert len(document["coefficients"]) == 940


def test_demo(tmp_path):
    done = run("demo", cwd=tmp_path)
    assert done.stderr == ""
    out = tmp_path / "covey-demo"
    assert (out / "shrinkage.png").stat().st_size > 20_000
    assert (out / "model" / "model.json").exists()
    assert done.stdout.splitlines()[-1].endswith("covey-demo/report.html")
    assert "one pooled model" in (out / "report.html").read_text()
    lines = [line.split() for line in done.stdout.splitlines() if "│" in line]
    errors = {line[1]: float(line[3]) for line in lines[:4]}
    assert errors["hierarchical"] == min(errors.values())
    again = json.loads(run("demo", "--json", cwd=tmp_path).stdout)
    assert again["held_out"]["errors"] == pytest.approx(errors, abs=1e-4)
    assert again["federated"]["difference"] < 1e-10
    assert "across 3 sites that keep their rows: coefficients of clients, clusters and the global model agree" in done.stdout
    assert re.search(r"^in all +\d+ +3 +\S+ kB +\S+ kB", done.stdout, re.M)


FIT = ("fit", "homes.csv", "log_radon ~ floor", "--client", "county", "--cluster", "state")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("fit", "gone.csv", "y ~ x", "--client", "c"), "There is no file 'gone.csv'; check the path."),
        ((*FIT[:3], "--client", "conty"), "There is no column 'conty'; did you mean 'county'?"),
        (("fit", "homes.csv", "log_radon ~ flor", *FIT[3:]), "There is no column 'flor'; did you mean 'floor'?"),
        (("fit", "homes.csv", "log_radon ~ uranium", *FIT[3:]), "Column 'uranium' is NaN in row 163 (client 'La Paz, AZ');"),
        (("fit", "moved.csv", *FIT[2:]), "Client 'Apache, AZ' is in clusters"),
        ((*FIT, "--gamma", "-1"), "The 'gamma' parameter must lie in [0, inf). Got -1 instead."),
        ((*FIT, "--gamma", "lots"), "Invalid value for '--gamma': "),
        ((*FIT, "--family", "binomial"), "The 'family' parameter must be one of 'bernoulli', 'gamma', 'gaussian', 'poisson'."),
        ((*FIT, "--family", "bernoulli"), "Only binary classification is supported."),
        ((*FIT, "--baseline", "pooled"), "The 'baseline' parameter must be one of"),
        (
            (*FIT, "--solver", "proxskip", "--option", "participation=0.5"),
            "no option 'participation': its proximal step needs every client",
        ),
        (
            (*FIT, "--gamma", "10", "--solver", "l2gd", "--option", "participation=available"),
            "participation='available' is not possible: the theorem needs clusters that are drawn independently",
        ),
        ((*FIT, "--out", "precious"), "'precious' exists and is not a covey model"),
        ((*FIT, "--holdout", "1.5"), "The share of rows held out must be between 0 and 1"),
        (("fit", "--frobnicate"), "No such option"),
        (("predict", "nothing", "homes.csv"), "There is no model folder 'nothing'"),
        (("predict", "model", "homes.csv", "--level", "county"), "The 'level' parameter must be one of"),
        (("predict", "model", "homes.csv", "--out", "p.xlsx"), "must end in .parquet or .csv"),
        (("predict", "broken", "homes.csv"), "damaged"),
        (("predict", "model", "homes.csv", "--out", "no/where.csv"), "'no/where.csv' cannot be written"),
        (("predict", "model", "homes.csv", "--out", "p.csv", "--json"), "leave one of them out"),
        ((*FIT, "--out", "homes.csv/model"), "cannot be written: "),
        ((*FIT, "--seed", "-1"), "must be a whole number >= 0. Got -1 instead."),
        (("demo", "--out", "homes.csv"), "cannot be written: "),
        (("show", "model", "--level", "county"), "The '--level' parameter must be one of"),
        (("frobnicate",), "No such command 'frobnicate'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(folder, arguments, sentence):
    if not (folder / "moved.csv").exists():
        pl.read_csv(folder / "homes.csv").with_row_index().with_columns(
            state=pl.when(pl.col("index") == 0).then(pl.lit("PA")).otherwise("state")
        ).write_csv(folder / "moved.csv")
        (folder / "precious").mkdir()
        (folder / "precious" / "file").touch()
        (folder / "broken").mkdir()
        (folder / "broken" / "model.json").write_text("{")
    done = inside(*arguments, cwd=folder, check=False)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert done.stderr.startswith("covey: ")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


NAMES = [command.name or command.callback.__name__.replace("_", "-") for command in app.registered_commands]


@pytest.mark.parametrize("command", NAMES)
def test_help_has_an_example(tmp_path, command):
    assert f"covey {command} " in inside(command, "--help", cwd=tmp_path).stdout.split("Example")[1]


def test_help_loads_no_numerical_library():
    code = (
        "import sys, covey.cli; print([m for m in ('numpy', 'numba', 'sklearn', 'polars', 'matplotlib') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_a_closed_pipe_is_no_error(folder):
    command = f"{COVEY} predict model homes.parquet | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=folder, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("state,county,prediction")
    assert done.stderr == ""


FLAGS = {"client", "cluster", "gamma", "solver", "baseline", "reduction", "weights", "offset", "tol", "max_iter", "formula"}
IN_SHELL = [case for case in CASES if set(case[1]) <= FLAGS and case[1].get("client", "") is not None]


@pytest.mark.parametrize(("frame", "settings", "message"), IN_SHELL)
def test_every_bad_table_is_one_line_in_the_shell(tmp_path, frame, settings, message):
    """All cases of tests/test_bad_input.py again, through the command line."""
    frame.write_parquet(tmp_path / "t.parquet")
    chosen = {"client": "who", "cluster": "group", "formula": "y ~ x", **settings}
    formula = chosen.pop("formula")
    options = [f"--{name.replace('_', '-')}={value}" for name, value in chosen.items()]
    done = inside("fit", "t.parquet", formula, *options, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("covey: ")
    assert done.stderr.count("\n") == 1
    assert re.search(message, done.stderr)


@pytest.mark.parametrize(
    ("content", "family", "sentence"),
    [
        ("who,y\na,1\nb,1\n", "bernoulli", "one class only"),
        ("who,y\na,1\nb,-2\n", "poisson", "The response is -2 in row 1 (client 'b')"),
        ("who,y\na,0\nb,0\n", "poisson", "The response is 0 in every row"),
        ("who,y\na,0\nb,NA\n", "gaussian", "The response is NaN in row 1 (client 'b')"),
        ("", "gaussian", "cannot be read"),
    ],
)
def test_wrong_responses_and_files_in_the_shell(tmp_path, content, family, sentence):
    (tmp_path / "t.csv").write_text(content)
    done = inside("fit", "t.csv", "y ~ 1", "--client", "who", "--family", family, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


def test_zip_codes_in_a_csv_keep_their_zeros(tmp_path):
    (tmp_path / "t.csv").write_text("zip,y\n" + "01234,1\n1234,9\n02138,5\n01234,2\n1234,8\n02138,4\n" * 5)
    inside("fit", "t.csv", "y ~ 1", "--client", "zip", "--holdout", "0", "--out", "m", cwd=tmp_path)
    (tmp_path / "new.csv").write_text("zip\n1234\n99999\n")
    table = pl.read_csv(inside("predict", "m", "new.csv", cwd=tmp_path).stdout.encode())
    assert table["answered_by"].to_list() == ["client", "global"]
    assert table["prediction"][0] > 7


def test_a_model_fitted_to_arrays_is_refused(tmp_path):
    from covey import HierarchicalRegressor

    HierarchicalRegressor(gamma=1.0).fit([[0.0], [1.0]], [1.0, 3.0], client=["a", "b"]).save(tmp_path / "m")
    pl.DataFrame({"x0": [1.0]}).write_csv(tmp_path / "t.csv")
    done = inside("predict", "m", "t.csv", "--level", "global", cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert "fitted to plain arrays" in done.stderr


def test_poisson_comparison_is_a_deviance(tmp_path):
    from covey.datasets import simulate

    drawn = simulate(
        "poisson", clusters=3, clients=5, rows=12, d=1, intercept=True, wbar=3.0, client_sd=0.2, cluster_sd=0.2, seed=0
    )
    drawn.frame().write_csv(tmp_path / "t.csv")
    done = inside(
        "fit", "t.csv", "y ~ 1", "--client", "client", "--cluster", "cluster", "--family", "poisson", "--json", cwd=tmp_path
    )
    assert all(0.2 < error < 10 for error in json.loads(done.stdout)["held_out"]["errors"].values())


def test_penalties_for_the_comparison_are_chosen_on_training_rows(folder, homes):
    from covey.fitting.comparison import compare
    from covey.problem.problem import Spec, resolve
    from covey.problem.rows import read_rows

    spec = Spec(client="county", cluster="state", formula="log_radon ~ floor", penalty="cv")
    expected = compare(*read_rows(homes, resolve(spec))).errors["hierarchical"]
    done = inside(*FIT, "--penalty", "cv", "--json", cwd=folder)
    assert json.loads(done.stdout)["held_out"]["errors"]["hierarchical"] == pytest.approx(expected)


def test_standardised_terms_in_the_shell(folder, homes):
    asked = (
        "homes.parquet",
        "log_radon ~ floor",
        "--client",
        "county",
        "--cluster",
        "state",
        "--gamma",
        "3",
        "--standardize",
    )
    document = json.loads(inside("fit", *asked, "--holdout", "0", "--out", "scaled", "--json", cwd=folder).stdout)
    model = HierarchicalRegressor(client="county", cluster="state", formula="log_radon ~ floor", gamma=3.0, standardize=True)
    model.fit(homes)
    assert document["global"] == dict(zip(model.terms_, model.global_coef_.tolist(), strict=True))
    assert document["summary"]["standardize"] is True
    assert "coefficients are per standard deviation" in inside("show", "scaled", cwd=folder).stdout
    predicted = pl.read_csv(inside("predict", "scaled", "homes.parquet", cwd=folder).stdout.encode())
    np.testing.assert_allclose(predicted["prediction"].to_numpy(), model.predict(homes), rtol=1e-12)
    planned = json.loads(inside("plan", *asked, "--json", cwd=folder).stdout)
    assert planned["cheapest"] == "sweep"
    inside("federate", *asked, "--simulate", "3", "--out", "sites", cwd=folder)
    found, own = (json.loads((folder / name / "model.json").read_text())["design"] for name in ("sites/operator", "scaled"))
    assert own["kind"] == "scaled"
    assert (found["mean"], found["sd"]) == (own["mean"], own["sd"])
    wrong = inside("show", "sites", cwd=folder, check=False)
    assert "'sites/operator'" in wrong.stderr
    wrong = inside("show", "sites/operator", "--level", "client", cwd=folder, check=False)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "covey: The clients' models are at their sites, 'site1', 'site2', 'site3'; show them there.\n"


def test_version(tmp_path):
    from covey import __version__

    assert run("--version", cwd=tmp_path).stdout == f"covey {__version__}\n"


WHERE = ["homes.parquet", "log_radon ~ floor", "--client", "county", "--cluster", "state"]


def test_plan_prints_a_table_and_draws_the_race(folder):
    done = run("plan", *WHERE, "--gamma", 10, "--figure", "race.png", "--max-iter", 2000, cwd=folder)
    assert done.stderr == ""
    assert "* sweep" in done.stdout
    assert "al2sgd_plus" in done.stdout
    assert (folder / "race.png").read_bytes().startswith(b"\x89PNG")
    document = json.loads(run("plan", *WHERE, "--gamma", 10, "--json", cwd=folder).stdout)
    assert document["cheapest"] == "sweep"
    assert {cost["solver"] for cost in document["solvers"]} == set(registry.names())
    wrong = run("plan", *WHERE, "--accuracy", 3, cwd=folder, check=False)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "covey: The 'accuracy' parameter must be a number below 1. Got 3.0 instead.\n"


def test_fit_by_a_randomised_algorithm_with_a_checkpoint(folder):
    randomised = ["--solver", "al2sgd_plus", "--gamma", 10, "--tol", 1e-3, "--checkpoint", "run.npz", "--holdout", 0, "--json"]
    first = json.loads(run("fit", *WHERE, *randomised, cwd=folder).stdout)
    assert first["convergence"]["solver"] == "al2sgd_plus"
    assert first["convergence"]["converged"]
    assert (folder / "run.npz").exists()
    again = json.loads(run("fit", *WHERE, *randomised, cwd=folder).stdout)
    assert again["global"] == first["global"]
    other = run("fit", *WHERE, *randomised, "--seed", 5, cwd=folder, check=False)
    assert other.returncode == 2
    assert other.stderr.startswith("covey: The checkpoint 'run.npz' is of another run (other seed)")
    for extra, message in (
        (["--option", "p0"], "The option --option must be name=value, such as p0=0.1. Got 'p0' instead."),
        (["--option", "p0=2"], "The 'p0' parameter must lie in [0, 1]. Got 2 instead."),
        (["--option", "q=2"], "The solver 'al2sgd_plus' has no option 'q';"),
    ):
        wrong = run("fit", *WHERE, *randomised, *extra, cwd=folder, check=False)
        assert wrong.returncode == 2
        assert message in wrong.stderr
        assert wrong.stderr.count("\n") == 1


# covey reproduce


def charity(folder):
    from covey.datasets import simulate_donors

    drawn = simulate_donors(zips=60, appeals=2400, seed=2)
    for name in ("appeals", "gifts", "zips"):
        getattr(drawn, name).write_csv(folder / f"{name}.csv")
    return ["--appeals", "appeals.csv", "--gifts", "gifts.csv", "--zips", "zips.csv"]


def test_reproduce_gives_the_same_digits_for_any_number_of_threads(tmp_path):
    tables = charity(tmp_path)
    for threads in ("1", "2"):
        limits = dict.fromkeys(("NUMBA_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "POLARS_MAX_THREADS"), threads)
        environment = {**os.environ, **limits, "COLUMNS": "100"}
        command = [COVEY, "reproduce", "donors", *tables, "--quick", "--seed", "3", "--out", f"by-{threads}"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stderr == "", "no progress in a pipe"
        assert "ZIPs kept: 60." in done.stdout
        assert "page   by-" in done.stdout
    page = (tmp_path / "by-1" / "README.md").read_text()
    assert "`covey reproduce donors --appeals appeals.csv --gifts gifts.csv --zips zips.csv --quick --seed 3`" in page
    files = sorted(path.relative_to(tmp_path / "by-1") for path in (tmp_path / "by-1").rglob("*.*"))
    assert {path.suffix for path in files} == {".md", ".csv", ".png", ".svg"}
    for path in files:
        assert (tmp_path / "by-1" / path).read_bytes() == (tmp_path / "by-2" / path).read_bytes(), path


def test_reproduce_writes_one_page_for_several_studies(tmp_path):
    tables = charity(tmp_path)
    run("reproduce", "donors", *tables, "--quick", "--out", "r", cwd=tmp_path)
    run("reproduce", "limits", "--quick", "--out", "r", cwd=tmp_path)
    page = (tmp_path / "r" / "README.md").read_text()
    assert page.index("## Donors") < page.index("## Limits")
    for link in re.findall(r"\]\(([^)]+)\)", page):
        assert (tmp_path / "r" / link).exists(), link


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["figures"], "'study' parameter must be one of 'simulation'"),
        (["donors", "--appeals", "a.csv"], "--appeals, --gifts and --zips"),
        (["limits", "--data", "k.csv"], "draws its own data"),
        (["donors", "--data", "nowhere.csv"], "no file 'nowhere.csv'"),
        (["donors", "--data", "k.csv", "--appeals", "a", "--gifts", "b", "--zips", "c"], "not both"),
        (["limits", "--out", "file.txt"], "is a file"),
        (["limits", "--seed", "-1"], "seed must be a whole number"),
        (["limits", "--out", "mine"], "not written by covey"),
    ],
)
def test_reproduce_refuses_wrong_arguments_in_one_line(tmp_path, arguments, sentence):
    (tmp_path / "file.txt").write_text("")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "README.md").write_text("# Mine")
    done = inside("reproduce", *arguments, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


def test_reproduce_reports_problems_in_the_tables_of_a_charity(tmp_path):
    charity(tmp_path)
    appeals = pl.read_csv(tmp_path / "appeals.csv")
    pl.concat([appeals.reverse(), appeals[:5]]).write_csv(tmp_path / "appeals.csv")
    zips = pl.read_csv(tmp_path / "zips.csv", schema_overrides={"zip": pl.String})
    zips[5:].write_csv(tmp_path / "zips.csv")
    done = run(
        "reproduce", "donors", "--appeals", "appeals.csv", "--gifts", "gifts.csv", "--zips", "zips.csv", "--quick", cwd=tmp_path
    )
    for line in ("the table was sorted", "to the same donor on the same day: 5.", "history and answer no appeal", '"unknown"'):
        assert line in done.stdout
    gifts = pl.read_csv(tmp_path / "gifts.csv", schema_overrides={"zip": pl.String})
    gifts.with_columns(date=pl.lit("last week")).write_csv(tmp_path / "gifts.csv")
    done = run(
        "reproduce",
        "donors",
        "--appeals",
        "appeals.csv",
        "--gifts",
        "gifts.csv",
        "--zips",
        "zips.csv",
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 2
    assert "last week" in done.stderr


def test_a_terminal_shows_the_step_and_a_bar_of_its_parts(monkeypatch):
    file = StringIO()
    monkeypatch.setattr("covey.cli._options.Console", lambda **_: Console(file=file, force_terminal=True, width=80))
    with working("reading") as say:
        say("fitting")
        say(done=1, of=2)
    assert f"fitting  |{'=' * 15}{' ' * 15}| 50%" in file.getvalue()
