"""What ``covey node``, ``covey link`` and ``covey federate`` say to mistakes, before Flower is started."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import duckdb
import numpy as np
import polars as pl
import pytest
from typer.main import get_command

from covey.cli import app
from covey.cli.site import in_words
from covey.errors import CoveyError, FederationError
from covey.federation.site.file import SiteFile
from tests.federation.sites import fit, in_memory, spec, table

from .shell import inside, run

NODE = ("node", "--table", "a.csv", "--home", "home", "--link", "localhost:8000")
KEYS = (*NODE, "--site", "a", "--ca", "a.crt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("federation")
    (place / "a.csv").write_text("x\n1\n")
    (place / "a.crt").write_text("a certificate")
    for name, mode in (("a.key", 0o600), ("open.key", 0o644)):
        (place / name).write_text("a key")
        (place / name).chmod(mode)
    (place / "a.key.pub").write_text("ecdsa-sha2-nistp384 AAAA north")
    return place


@pytest.fixture
def starts_nothing(monkeypatch):
    """Without a mistake the command would become Flower's, and this process with it."""

    def become(*_):
        raise AssertionError("Flower would have been started")

    pytest.importorskip("flwr")
    monkeypatch.setattr("covey.federation.flower.launch._become", become)


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (("node", "--table", "b.csv", *NODE[3:], "--insecure", "--site", "a"), ["table 'b.csv'", "check the path"]),
        ((*NODE, "--insecure"), ["has no name", "--site"]),
        (NODE, ["has no ca", "--ca", "--insecure"]),
        (KEYS, ["has no key", "--key", "--insecure"]),
        ((*KEYS, "--key", "b.key"), ["key 'b.key'", "check the path"]),
        ((*KEYS[:-1], "b.crt", "--key", "a.key"), ["certificate 'b.crt'", "check the path"]),
        ((*KEYS, "--key", "open.key"), ["key 'open.key'", "chmod 600"]),
        ((*KEYS, "--key", "a.key"), ["key 'a.key'", "ssh-keygen -t ecdsa -b 384"]),
        ((*KEYS, "--key", "a.key.pub"), ["key 'a.key.pub'", "public half", "give the private half"]),
        ((*NODE[:-1], "localhost", "--insecure", "--site", "a"), ["link", "host and port", "'localhost'"]),
        (("node", "init", "a.csv", "--home", "new", "--client", "y"), ["column 'y'", "'x'"]),
        (("site", "approve", "--home", "home"), ["No question waits"]),
        (("site", "check", "a.csv", "--home", "home"), ["'a.csv'", "JSON"]),
        (("link",), ["--cert and --key", "--insecure"]),
        (("link", "--cert", "b.crt", "--key", "a.key"), ["certificate 'b.crt'", "check the path"]),
        (("link", "--cert", "a.crt", "--key", "open.key"), ["key 'open.key'", "chmod 600"]),
    ],
)
def test_mistakes_are_one_sentence(folder, words, facts, starts_nothing):
    done = inside(*words, cwd=folder, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"covey: [^\n]+\n", done.stderr)
    assert all(fact in done.stderr for fact in facts), done.stderr
    assert not (folder / "home").exists()


def test_a_link_that_is_not_there(folder, monkeypatch):
    pytest.importorskip("flwr")
    monkeypatch.setenv("FLWR_HOME", str(folder))
    (folder / "config.toml").write_text('[superlink.dead]\naddress = "127.0.0.1:9"\ninsecure = true\n')
    done = run("federate", "y ~ x", "--client", "c", "--link", "other", cwd=folder, check=False)
    assert done.returncode == 2
    config = folder / "config.toml"
    assert all(fact in done.stderr for fact in ("'other'", str(config), "[superlink.other]", "root-certificates")), done.stderr
    done = run("federate", "y ~ x", "--client", "c", "--link", "dead", cwd=folder, check=False)
    assert all(fact in done.stderr for fact in ("'dead'", "does not answer", "certificate", str(config))), done.stderr


def test_a_site_writes_its_rules_checks_a_fit_and_decides(tmp_path):
    """``covey node init`` and ``covey site``, as an owner uses them."""
    frame = table(1, clients=60, clusters=3).with_columns(one=(pl.col("client") == "c7").cast(pl.Int64))
    frame.write_parquet(tmp_path / "t.parquet")
    inside("node", "init", "t.parquet", "--home", "north", "--client", "client", "--groups", "cluster", cwd=tmp_path)
    home = tmp_path / "north"
    assert (home / "site.toml").stat().st_mode & 0o77 == 0
    policy = SiteFile.read(home).policy
    assert (policy.client, policy.groups) == ("client", ("cluster",))
    assert policy.columns == ("x", "z", "y", "weight", "one")
    assert (policy.approve, policy.minimum, policy.expressions) == ("ask", 10, ())
    done = inside("node", "init", "t.parquet", "--home", "north", "--client", "client", cwd=tmp_path, check=False)
    assert "already" in done.stderr
    asked = {"formula": "y ~ x + one", "client": "client", "cluster": "cluster", "gamma": 1.0}
    (tmp_path / "problem.json").write_text(json.dumps(asked))
    said = inside("site", "check", "problem.json", "--home", "north", cwd=tmp_path).stdout
    assert all(fact in said for fact in ("one in 'b': 1 clients", "100%", "a: 20 clients", "none of those allowed")), said
    assert "keyed hashes of ids" in said
    assert "squares" not in said.split("then leaves")[0]
    (tmp_path / "problem.json").write_text(json.dumps(asked | {"standardize": True, "na": "drop"}))
    said = inside("site", "check", "problem.json", "--home", "north", cwd=tmp_path).stdout
    first = said.split("then leaves")[0]
    assert all(fact in first for fact in ("sums of columns and of their squares", "missing values")), said

    (tmp_path / "problem.json").write_text(
        json.dumps({"formula": "y ~ x + z", "client": "client", "gamma": 1.0, "weights": "w"})
    )
    rare = pl.read_parquet(tmp_path / "t.parquet").with_columns(
        z=pl.when(pl.col("client").rank("dense") <= 4).then(pl.lit("a")).otherwise(pl.lit("b")), w=pl.lit(1.0)
    )
    before = (home / "site.toml").read_text()
    (home / "site.toml").write_text(re.sub(r"\ncolumns = .*", '\ncolumns = ["y", "x", "z", "w"]', before))
    rare.write_parquet(tmp_path / "t.parquet")
    said = inside("site", "check", "problem.json", "--home", "north", cwd=tmp_path).stdout
    assert "Column 'z' has a value that fewer than 10 clients here have" in said
    assert "All sums may leave" not in said
    assert "w, x, y, z" in said
    (home / "site.toml").write_text(before)

    text = (home / "site.toml").read_text().replace("insecure = false", "insecure = true")
    assert SiteFile.read(home).policy.operators == ()
    text = text.replace("operators = []", 'operators = ["any"]')
    (home / "site.toml").write_text(text)
    site = SiteFile.read(home).open()
    for _ in range(2):
        with pytest.raises(FederationError, match="not decided"):
            fit({"north": site}, spec(formula="y ~ x"))
    said = inside("site", "runs", "--home", "north", cwd=tmp_path).stdout
    name = said.split()[0]
    asked = json.loads((home / "questions.json").read_text())
    asked["questions"][name]["spec"]["solver"] += "\x1b[2J"
    shown = in_words(SiteFile.read(home), asked["questions"][name])
    assert "auto?[2J" in shown
    assert "\x1b" not in shown
    assert all(fact in said for fact in ("waiting", "y ~ x", "joined 0 of the 20 runs"))
    said = inside("site", "runs", name, "--home", "north", cwd=tmp_path).stdout
    assert all(fact in said for fact in ("operator without a key", "not masked", "'cluster'", "All sums may leave")), said
    assert "approved" in inside("site", "approve", "--home", "north", cwd=tmp_path).stdout
    fit({"north": site}, spec(formula="y ~ x"))
    assert "used" in inside("site", "runs", "--home", "north", cwd=tmp_path).stdout
    assert "refused" in inside("site", "refuse", name, "--home", "north", cwd=tmp_path).stdout
    last = inside("site", "log", "--home", "north", "--last", "1", cwd=tmp_path).stdout
    assert json.loads(last)["event"] == "refused"
    assert "lines, each follows" in inside("site", "log", "--home", "north", "--verify", cwd=tmp_path).stdout


def test_a_site_on_a_database(tmp_path):
    """``covey node init`` names the table of a DuckDB file; a wrong name is found when the node starts."""
    frame = table(2, clients=60, clusters=3)
    with duckdb.connect(tmp_path / "t.duckdb") as connection:
        connection.sql("CREATE TABLE visits AS SELECT * FROM frame")
    init = ("node", "init", "t.duckdb", "--client", "client", "--groups", "cluster")
    assert "--table-name; it has visits" in inside(*init, "--home", "north", cwd=tmp_path, check=False).stderr
    inside(*init, "--home", "north", "--table-name", "visits", "--insecure", cwd=tmp_path)
    file = tmp_path / "north" / "site.toml"
    file.write_text(file.read_text().replace('approve = "ask"', 'approve = "policy"'))
    outcome = fit({"north": SiteFile.read(file.parent).open()}, spec(formula="y ~ x"))
    np.testing.assert_allclose(outcome.model.w, in_memory(frame, spec(formula="y ~ x")).w, rtol=0, atol=1e-10)
    (tmp_path / "problem.json").write_text(json.dumps({"formula": "y ~ x", "client": "client", "cluster": "cluster"}))
    assert "All sums may leave" in inside("site", "check", "problem.json", "--home", "north", cwd=tmp_path).stdout
    file.write_text(file.read_text().replace('"visits"', '"visit"'))
    with pytest.raises(CoveyError, match="no table 'visit'; did you mean 'visits'"):
        SiteFile.read(file.parent).open()

    frame.write_parquet(tmp_path / "t.parquet")
    inside("node", "init", "*.parquet", "--home", "south", "--client", "client", cwd=tmp_path)
    assert '\n# table_name = "visits"\n' in (tmp_path / "south" / "site.toml").read_text()
    assert SiteFile.read(tmp_path / "south").places["table"] == str(tmp_path / "*.parquet")


@pytest.mark.parametrize("unit", ["covey-link.service", "covey-node@.service"])
def test_a_unit_of_systemd_starts_a_command_that_exists_and_writes_to_one_folder(unit):
    lines = (Path(__file__).parents[2] / "deploy" / unit).read_text().splitlines()
    settings = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    program, name, *words = shlex.split(settings["ExecStart"])
    get_command(app).commands[name].make_context(name, [*words]).close()  # an unknown option or a missing one is an error
    (folder,) = settings["ReadWritePaths"].split()
    places = {**settings, "--home": dict(zip(words[::2], words[1::2], strict=True)).get("--home")}
    assert folder in (places["--home"], places.get("WorkingDirectory"))
    assert not folder.startswith(str(Path(program).parents[1]))
    assert (settings["ProtectSystem"], settings["UMask"], settings["Restart"]) == ("strict", "0077", "on-failure")
