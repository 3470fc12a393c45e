"""docs/how-to/deploy.md, typed word by word into a shell, with real programs; only the port is another."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from covey.model.files import load_model
from covey.problem.problem import Spec
from tests.fits import fit_table

from .conftest import deployed, needs_programs
from .deployment import Processes, free_port, until

GUIDE = Path(__file__).parents[3] / "docs" / "how-to" / "deploy.md"


def commands():
    """What stands after ``$``, with the lines after ``>`` that belong to it; what ends everything goes to the end."""
    blocks = re.findall(r"```console\n(.*?)```", GUIDE.read_text(), re.S)
    parts = [part for block in blocks for part in re.split(r"^\$ ", block, flags=re.M)[1:]]
    plain = [re.sub(r"^> ", "", part, flags=re.M).rstrip("\n") for part in parts]
    return sorted(plain, key=lambda command: command.startswith("kill "))


class Shell:
    """One bash for the whole page, so that jobs are its own; each command is waited for, and must succeed."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.said = folder, folder / "said.txt"
        self.said.touch()
        with self.said.open("ab") as said:
            self.bash = subprocess.Popen(
                ["bash"], cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=said, stderr=said, text=True
            )

    def type(self, command: str, patience: float) -> str:
        before = self.said.read_text()
        end = f"end of command {time.monotonic_ns()}"
        self.bash.stdin.write(f'{command}\necho "{end}: $?"\n')
        self.bash.stdin.flush()
        until(lambda: f"{end}: " in self.said.read_text(), patience)
        said = self.said.read_text().removeprefix(before)
        assert said.rstrip().endswith(f"{end}: 0"), f"{command}\n{said}"
        log = re.search(r"> (\S+\.log) 2>&1 &$", command)  # a server; a fit in the background is waited for later
        if log:
            ready = "Uvicorn running" if "covey link" in command else "connected to"
            until(lambda: ready in (self.folder / log[1]).read_text(), patience)
        return said.partition(end)[0]


@pytest.mark.federation
def test_the_guide_word_by_word(tmp_path):
    needs_programs("bash", "openssl", "ssh-keygen")
    port = str(free_port())
    typed = [command.replace("127.0.0.1:8000", f"127.0.0.1:{port}") for command in commands()]
    typed = [re.sub(r"^covey link ", f"covey link --port {port} ", command) for command in typed]
    processes = Processes(tmp_path, HOME=str(tmp_path), FLWR_HOME=str(tmp_path / ".flwr"))
    try:
        shell = Shell(tmp_path, processes.environment)
        said = {command: shell.type(command, 180) for command in typed}
        assert (tmp_path / "link.key").stat().st_mode & 0o77 == 0
        dry = next(text for command, text in said.items() if command.endswith("--dry-run"))
        assert "east: its owner would be asked" in dry
        assert "north: it would take part" in dry
        assert "All sums may leave" in said["covey site check problem.json --home east"]
        assert "in 5 clusters (state), at 3 sites" in said["cat result.txt"]
        assert "138 clients (county)" in said["covey show north/model"]
        assert "joined 1 of the 20 runs" in said["covey site runs --home east"]
        assert re.search(r"\d+ lines, each follows", said["covey site log --home north --verify"])
        assert "3 sites" in said["covey status --link link"]
        assert {(tmp_path / name).stat().st_mode & 0o77 for name in ("link.db", "fit", "east")} == {0}
        tables = pl.concat([pl.read_parquet(tmp_path / f"{site}.parquet") for site in ("east", "north", "west")])
        settings = json.loads((tmp_path / "problem.json").read_text())
        np.testing.assert_allclose(load_model(tmp_path / "fit")[0].w, fit_table(tables, Spec(**settings)).w, rtol=0, atol=1e-10)
        assert typed[-1].startswith("kill ")
        until(lambda: not processes.marked("covey"), 30)
    finally:
        processes.stop()


@pytest.mark.federation
def test_the_front_of_the_guide_lets_sites_through_and_nobody_else(tmp_path):
    """The page's nginx: a node behind it answers; whoever would start runs or register nodes through it is refused."""
    needs_programs("nginx")
    (server,) = re.findall(r"```nginx\n(.*?)```", GUIDE.read_text(), re.S)
    with deployed(tmp_path, changed="standin") as deployment:
        front = f"127.0.0.1:{free_port()}"
        deployment.command("cp link.crt front.crt && cp link.key front.key")
        for written, here in {
            "8443": front,
            "127.0.0.1:8000": deployment.address,
            "/etc/covey": str(tmp_path),
        }.items():
            assert written in server
            server = server.replace(written, here)
        temporary = " ".join(
            f"{kind}_temp_path {tmp_path / kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        alone = f"daemon off; master_process off; pid {tmp_path / 'front.pid'}; events {{}}"
        (tmp_path / "front.conf").write_text(f"{alone}\nhttp {{ access_log {tmp_path / 'access.log'}; {temporary}\n{server} }}")
        deployment.start("front", f"nginx -c {tmp_path / 'front.conf'} -e {tmp_path / 'front.err'}")
        deployment.register("north")
        deployment.start_node("north", link=front)
        code, out, err = deployment.run({"sites": "north", "script": [[{"north": "1"}, 60]]})
        assert code == 0, err
        assert "north: 1, by process" in out
        config = tmp_path / "flwr" / "config.toml"
        config.write_text(
            config.read_text() + config.read_text().replace(deployment.address, front).replace(".link]", ".front]")
        )
        deployment.command("flwr list link")
        refused = deployment.command("flwr list front 2>&1", code=1)
        assert "403" in refused, refused
        deployment.kill("front")


def test_the_guides_links_lead_somewhere():
    text = GUIDE.read_text()
    headings = {re.sub(r"[^a-z ]", "", line.lower()).strip().replace(" ", "-") for line in re.findall(r"^#+ (.*)$", text, re.M)}
    for link in re.findall(r"\]\(([^)h][^)]*)\)", text):
        assert link.removeprefix("#") in headings or (GUIDE.parent / link.split("#")[0]).exists(), link
