"""A deployment on this machine, of real processes: a link and its nodes, under TLS with node keys, on free ports."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path

import polars as pl

BIN = Path(sys.executable).parent
ALLOWED = {
    "client": "county",
    "groups": ["state"],
    "columns": ["log_radon", "radon", "floor", "high"],
    "families": ["gaussian", "bernoulli"],
    "solvers": ["sweep", "newton", "learn"],
    "replies": "all",
    "secure": False,
    "approve": "policy",
    "operators": ["any"],
    "minimum": 1,
    "share": 1.0,
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def until(what, patience: float = 180.0, pause: float = 0.1):
    """Wait until this is true, and give it back."""
    deadline = time.monotonic() + patience
    while not (value := what()):
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(pause)
    return value


def hear(run, word, patience: float = 300.0):
    """Read what a run says until this is said; one that says nothing for too long is ended."""
    late = threading.Timer(patience, run.kill)
    late.start()
    try:
        if not any(word in line for line in run.stderr):
            raise AssertionError(f"the run ended, or was ended after {patience:g} seconds, before it said {word!r}")
    finally:
        late.cancel()


class Processes:
    """Processes in a folder, with a mark in their environment by which all are found at the end, whoever started them."""

    def __init__(self, folder: Path, **variables: str) -> None:
        self.folder = folder
        self.environment = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},  # as a user has it
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "COVEY_TEST_MARK": str(uuid.uuid4()),
            **variables,
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def command(self, line: str, *, code: int = 0, patience: float = 180.0) -> str:
        done = subprocess.run(
            line,
            shell=True,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=patience,
            check=False,
        )
        assert done.returncode == code, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout

    def start(self, name: str, line: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                line.split(), cwd=self.folder, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )
        return self.processes[name]

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def marked(self, word: str = "") -> list[int]:
        """Processes of this deployment whose command line holds this word."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if (
                    f"COVEY_TEST_MARK={self.environment['COVEY_TEST_MARK']}".encode() in (folder / "environ").read_bytes()
                    and word.encode() in (folder / "cmdline").read_bytes()
                ):
                    found.append(int(folder.name))
            except OSError:  # it has ended, or is another user's
                continue
        return found

    def kill(self, name: str) -> None:
        """As a power cut would: the node with all that it started."""
        self.processes[name].kill()
        self.processes[name].wait()

    def stop(self) -> None:
        for sign in (signal.SIGTERM, signal.SIGKILL):
            for pid in self.marked():
                with suppress(ProcessLookupError):  # it has ended by itself
                    os.kill(pid, sign)
            for process in self.processes.values():
                try:
                    process.wait(timeout=8)
                except subprocess.TimeoutExpired:
                    continue
        until(lambda: not self.marked())


class Deployment(Processes):
    """A link and its nodes; ``changed`` names a folder here with a ``sitecustomize`` that changes what its processes do."""

    def __init__(self, folder: Path, *, changed: str | None = None, insecure: bool = False) -> None:
        paths = [] if changed is None else [str(Path(__file__).with_name(changed))]
        path = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
        super().__init__(folder, PYTHONPATH=path, FLWR_HOME=str(folder / "flwr"))
        self.insecure = insecure
        self.address = f"127.0.0.1:{free_port()}"
        certificate = "" if insecure else f'root-certificates = "{folder / "link.crt"}"'
        config = f'[superlink.link]\naddress = "{self.address}"\ninsecure = {str(insecure).lower()}\n{certificate}\n'
        (folder / "flwr").mkdir()
        (folder / "flwr" / "config.toml").write_text(config)
        if not insecure:
            self.command(
                "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-384 -nodes -days 2 -keyout link.key -out link.crt "
                "-subj /CN=link -addext subjectAltName=DNS:localhost,IP:127.0.0.1 "
                "-addext keyUsage=critical,digitalSignature,keyCertSign"
            )

    def start_link(self, more: str = "") -> None:
        secure = "--insecure" if self.insecure else "--cert link.crt --key link.key"
        self.start("link", f"covey link {secure} --port {self.address.rpartition(':')[2]} {more}")
        until(lambda: "Application startup complete" in self.log("link"))

    def register(self, *sites: str) -> None:
        for site in sites:
            self.command(f"ssh-keygen -q -t ecdsa -b 384 -N '' -f {site}.key")
            self.command(f"flwr supernode register {site}.key.pub link --name {site}")

    def start_node(self, site: str, *, link: str | None = None, name: str | None = None, **rules: object) -> None:
        """Start the node of a site; its site.toml allows the survey of radon, and further rules replace those."""
        home, table = self.folder / site, self.folder / f"{site}.parquet"
        if not table.exists():
            pl.DataFrame({"x": [1]}).write_parquet(table)
        home.mkdir(exist_ok=True)
        places = {"site": name or site, "table": str(table), "link": link or self.address, "insecure": self.insecure}
        if not self.insecure:
            places |= {"key": str(self.folder / f"{site}.key"), "ca": str(self.folder / "link.crt")}
        peers = rules.pop("peers", {})
        lines = [f"{name} = {json.dumps(value)}" for name, value in {**places, **ALLOWED, **rules}.items()]
        lines += ["[peers]", *(f"{name} = {json.dumps(key)}" for name, key in peers.items())]
        (home / "site.toml").write_text("\n".join(lines))
        self.start(site, f"covey node --home {site}")

    def audit(self, site: str) -> list[dict]:
        return [json.loads(line) for line in (self.folder / site / "audit.jsonl").read_text().splitlines()]

    def run(self, settings: dict, *, wait: float = 180.0) -> tuple[int, str, str]:
        """A run through ``deploy`` in a process of its own: exit code, results, progress (and an error, if there is one)."""
        process = self.start_run(settings, wait=wait)
        out, err = process.communicate(timeout=300)
        return process.returncode, out, err

    def start_run(self, settings: dict, *, wait: float = 180.0) -> subprocess.Popen[str]:
        load = "import json, sys; from covey.federation.flower.launch import deploy"
        code = f"{load}; sys.exit(deploy(json.loads(sys.argv[1]), 'link'))"
        words = json.dumps({"wait": wait, "insecure": self.insecure, **settings})
        return subprocess.Popen(
            [sys.executable, "-c", code, words],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
