"""The processes of a deployment: the link, a node, a run.

Link and run are Flower's own commands with the options that they need, a node is covey's (:mod:`.node`). Flower's programs look
for one another on the PATH, so those of this environment come first. Nothing is installed at run time, and Flower's telemetry
and update check are off.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from covey._version import __version__
from covey.errors import INSTALL_FLOWER, FederationError
from covey.federation.privacy.signing import bare, check_secret, fingerprint, signed_by_operator, verified

if TYPE_CHECKING:
    from covey.federation.site.file import SiteFile

APP = Path(__file__).parent / "app"

_STARTED = re.compile(r"Successfully started run (\d+)")
_CHATTER = re.compile(r"(\x1b\[\d+m)?(INFO|DEBUG) |Successfully installed ")  # Flower's own lines in the log of a run
REPORT = "covey report: "  # begins the line of a run's log that has its outcome, if the coordinator cannot leave a file
_BROKEN = re.compile(r"ServerApp raised an exception$")  # Flower, before it shows what was raised


def start_link(
    *,
    database: Path,
    host: str = "127.0.0.1",
    port: int = 8000,
    certificate: Path | None = None,
    key: Path | None = None,
    ca: Path | None = None,
    insecure: bool = False,
    isolated: bool = False,
) -> NoReturn:
    """Become the link (``flower-superlink``): with TLS and node keys, unless ``insecure``.

    ``isolated`` leaves the coordinator to a ``flower-superexec`` that is started beside it, so that a run survives a link
    that is stopped and started again.
    """
    program = _program("flower-superlink")
    words = ["--host", host, "--port", str(port), "--database", str(database), "--disable-runtime-dependency-installation"]
    if isolated:
        words += ["--isolation", "process"]
    if insecure:
        words += ["--insecure"]
    else:
        if certificate is None or key is None:
            raise FederationError("A link needs --cert and --key for TLS; say --insecure to go without, on one machine only.")
        _check_file(certificate, "certificate")
        check_secret(_check_file(key, "key"))
        ca = certificate if ca is None else _check_file(ca, "certificate")
        words += ["--ssl-certfile", str(certificate), "--ssl-keyfile", str(key), "--ssl-ca-certfile", str(ca)]
        words += ["--enable-supernode-auth"]
    os.umask(0o077)  # its database holds messages and replies, so sums of sites: only the operator may read it
    _become(program, words, _environment())


def start_node(file: SiteFile) -> None:
    """Answer for a site until SIGTERM: verify who asks, and let the site decide."""
    check_flower(_installed())  # before parts of Flower are imported that other versions may not have
    from covey.federation.flower.node import Link, say, serve
    from covey.federation.flower.transport import WHO
    from covey.federation.site.file import NAME

    address, insecure = str(file.places["link"] or ""), bool(file.places["insecure"])
    if not address:
        there = "no link in its site.toml" if (file.home / NAME).exists() else "no site.toml; 'covey node init' writes one"
        raise FederationError(
            f"The folder {str(file.home)!r} has {there}; give --home if the site has another folder, or --link."
        )
    if not re.fullmatch(r".+:\d+", address):
        raise FederationError(f"The link must be host and port, such as link.example.org:8000. Got {address!r} instead.")

    certificate, site = None if insecure else file.place("ca"), file.open()

    def answer(kind: str, record: Mapping[str, Any]) -> Mapping[str, Any] | None:
        if kind == WHO:
            site.audit.add("status")
            return {"site": site.name, "about": json.dumps(file.in_short(__version__))}
        name, message, operator = (record.get(each) for each in ("site", "message", "operator"))
        if not (isinstance(name, str) and isinstance(message, bytes) and isinstance(operator, str)):
            site.audit.add("foreign message", kind=kind[:80])
            return None
        if name != site.name:
            site.audit.add("wrong name", name=name[:80])
            return {"refusal": f"it is {site.name!r} in its site.toml but is registered as {name!r}; use one name"}
        if operator and not verified(operator, str(record.get("signature")), *signed_by_operator(name, message)):
            site.audit.add("wrong signature", operator=fingerprint(operator))
            return {"refusal": "the signature of the operator is wrong; sign with the key that --operator-key names"}
        return {"message": site.answer(message, bare(operator))}

    def answer_or_fail(kind: str, record: Mapping[str, Any]) -> Mapping[str, Any] | None:
        try:
            return answer(kind, record)
        except Exception as problem:  # such as a full disk: without its line in the audit log no answer leaves
            say(f"only the type of this error was sent, {type(problem).__name__}: {str(problem)!a}")
            return {"refusal": f"it failed with {type(problem).__name__}; see the log at the site"}

    site.audit.add("start", covey=__version__, rules=file.in_short(__version__))
    serve(Link(address, certificate, site.identity), answer_or_fail)
    site.audit.add("stop")


def deploy(settings: Mapping[str, Any], link: str) -> int:
    """Run the fit on a link (a name in Flower's ``config.toml``), show what it says, and return 0 if it ended well, else 2.

    What the operator can put right is raised as a :class:`FederationError`, as if the fit ran here. An interrupt stops the run.
    Relative paths among the ``settings`` are those of this folder: the command is for the machine of the link.
    """
    left, log = _run(settings, link)
    if "text" in left:
        print(left["text"])
    for line in log.failure:
        print(line, file=sys.stderr)
    listed = _flwr("list", link, "--run-id", str(log.run), "--format", "json")
    if '"finished:' not in listed:
        again = f"when it is back, 'flwr log {log.run} {link}' shows whether it continues; if not, run the same command again."
        raise FederationError(f"The link {link!r} went away in the middle of run {log.run}; {again}")
    return 0 if '"finished:completed"' in listed else 2


def status_of(link: str, *, insecure: bool = False) -> dict[str, dict[str, Any]]:
    """The sites of a link: what their nodes say of themselves, their state and since when.

    Flower lists a node that is not connected without the name of its site, so it goes by its number.
    """
    left, _ = _run({"status": True, "insecure": insecure}, link)
    found: dict[str, dict[str, Any]] = json.loads(left.get("text", "{}"))
    names = {each["node"]: name for name, each in found.items()}
    found = {name: {"state": "online", "since": "now", **each} for name, each in found.items()}
    try:
        for each in json.loads(_flwr("supernode", "list", link, "--format", "json"))["nodes"]:
            if (state := each["status"]) != "unregistered":
                name = names.get(each["node-id"], f"node {each['node-id']}")
                since = each["online-at" if state == "online" else "offline-at"]
                found[name] = {**found.get(name, {}), "state": state, "since": since}
    except (ValueError, KeyError, TypeError):
        why = f"'flwr supernode list {link}' gave no list of sites"
        raise FederationError(f"{why}; check that the link runs and that this machine may use its /v1/control/.") from None
    return found


def _flwr(*words: str) -> str:
    """What a command of Flower prints."""
    command = [_program("flwr"), *words]
    return subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False).stdout


def _run(settings: Mapping[str, Any], link: str) -> tuple[dict[str, str], _RunLog]:
    """Start a run on a link and follow it to its end; what the coordinator left, and the log."""
    program, files = _program("flwr"), ("out", "members", "operator_key")
    paths = {name: str(Path(settings[name]).resolve()) for name in files if settings.get(name) is not None}
    given = {name: value for name, value in {**settings, **paths}.items() if value is not None}
    log = _RunLog()
    with tempfile.TemporaryDirectory() as folder:
        config, report = Path(folder) / "run.toml", Path(folder) / "report.json"
        # Flower's run config has no lists and no nesting: all settings are one text of JSON, which is a text of TOML too.
        settings_text = json.dumps(json.dumps({**given, "report": str(report)}))
        config.write_text(f"settings = {settings_text}\n", encoding="utf-8")
        command = [program, "run", str(APP), link, "--stream", "--run-config", str(config)]
        # An error in one line, and each line at once, not when the buffer of a pipe is full.
        environment = {**_environment(), "COLUMNS": "500", "PYTHONUNBUFFERED": "1"}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            try:
                for line in process.stdout or ():
                    log.read_line(line.rstrip("\n"))
            except KeyboardInterrupt:
                if log.run is not None:
                    subprocess.run([program, "stop", log.run, link], env=_environment(), stdout=sys.stderr, check=False)
                kept = " Its messages are kept beside --out; run the same command again to continue." if "out" in given else ""
                raise KeyboardInterrupt(f"Interrupted; the run has stopped.{kept}") from None
        left = json.loads(report.read_text(encoding="utf-8")) if report.exists() else log.left
    if log.run is None:
        raise _not_taken(link, " ".join(" ".join(log.before_start).split()))
    if "mistake" in left:
        raise FederationError(left["mistake"])
    return left, log


@dataclass
class _RunLog:
    """The log of a run, line by line: progress goes to stderr, other lines to stdout; Flower's own lines are dropped."""

    run: str | None = None
    before_start: list[str] = field(default_factory=list)  # lines before the run has started, or why it did not
    failure: list[str] = field(default_factory=list)  # lines from Flower's report of an exception of the coordinator
    left: dict[str, str] = field(default_factory=dict)  # the outcome, if the coordinator could not leave it in a file

    def read_line(self, line: str) -> None:
        started = _STARTED.search(line)
        if started:
            self.run = started[1]
        elif self.run is None:
            self.before_start.append(line.strip("\u2500\u2502\u256d\u256e\u2570\u256f "))  # Flower draws a box around errors
        elif line.startswith(REPORT):
            self.left = json.loads(line.removeprefix(REPORT))
        elif self.failure or _BROKEN.search(line):
            self.failure.append(line)
        elif not _CHATTER.match(line):
            print(line, file=sys.stderr if line.startswith("covey: ") else sys.stdout, flush=True)


def _not_taken(link: str, said: str) -> FederationError:
    """Why Flower did not start a run, in our words where we know it."""
    config = Path(os.environ.get("FLWR_HOME", "~/.flwr")) / "config.toml"
    if f"'{link}' not found" in said:
        why = f"There is no link {link!r} in {config}; add [superlink.{link}] with its address and root-certificates."
    elif "unavailable" in said:
        why = f"The link {link!r} does not answer; check that it runs, and its address and certificate in {config}."
    else:
        why = f"The link {link!r} did not take the run: {said[-150:].rstrip('.')}. Correct this and run the same command again."
    return FederationError(why)


def _environment() -> dict[str, str]:
    here = str(Path(sys.executable).parent)
    return {
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25",  # how often Flower looks for a process to start; its default is 1 second
        **os.environ,
        "PATH": os.pathsep.join([here, os.environ.get("PATH", os.defpath)]),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }


def check_flower(found: str | None) -> None:
    """Refuse to go on without Flower, or with a version whose fleet protocol a node was not tested with.

    >>> check_flower("1.41.0")
    >>> check_flower("1.43.0")
    Traceback (most recent call last):
    covey.errors.FederationError: This covey works with Flower 1.41 and 1.42, not with 1.43.0; pip install 'flwr>=1.41,<1.43'.
    """
    if found is None:
        raise FederationError(f"Federation across machines needs Flower; {INSTALL_FLOWER}.")
    if not re.match(r"1\.4[12]\.", found):
        fix = "pip install 'flwr>=1.41,<1.43'"
        raise FederationError(f"This covey works with Flower 1.41 and 1.42, not with {found}; {fix}.")


def _installed() -> str | None:
    try:
        return version("flwr")
    except PackageNotFoundError:
        return None


def _program(name: str) -> str:
    check_flower(_installed())
    return str(Path(sys.executable).with_name(name))


def _become(program: str, words: list[str], environment: Mapping[str, str]) -> NoReturn:
    sys.stdout.flush()
    os.execve(program, [program, *words], environment)


def _check_file(path: Path, what: str) -> Path:
    if not path.is_file():
        raise FederationError(f"There is no {what} {str(path)!r}; check the path.")
    if not os.access(path, os.R_OK):
        raise FederationError(f"The {what} {str(path)!r} cannot be read by this user; check its permissions.")
    return path
