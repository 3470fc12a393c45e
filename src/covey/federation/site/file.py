"""The file ``site.toml`` in the home of a site: where its table, its key and the link are, and what the site allows.

An unknown name or an unusable value is refused when the node starts. A rule that is left out has a cautious
default, but without a limit of epsilon no noise is required.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from covey.engines.warehouse import in_engine, open_table
from covey.errors import FederationError, did_you_mean, number
from covey.federation.privacy.differential import DELTA
from covey.federation.privacy.signing import bare, fingerprint, load_key, public_text
from covey.federation.site.budget import Budget
from covey.federation.site.policy import ANY, CHOICES, Policy
from covey.federation.site.site import Read, Site

NAME = "site.toml"
PLACES = {
    "site": "Name of this site, under which the operator registers its key.",
    "table": "The table: .parquet, .csv or .tsv; a folder or pattern of Parquet files; or a .duckdb file. It stays here.",
    "table_name": "Name of the table in the .duckdb file, such as visits or raw.visits.",
    "link": "Host and port of the operator's link.",
    "key": "Private key of this site.",
    "ca": "Certificate of the link, from the operator.",
    "insecure": "Whether to do without TLS and keys: on one machine, to try it.",
}
LIMITS = {
    "epsilon": "The most epsilon of one run. With this or epsilon_total, only private runs are answered.",
    "epsilon_total": "The most epsilon of all runs together.",
    "delta": "The delta of these limits.",
}
RULES = {part.name: part.metadata for part in fields(Policy) if part.metadata}


@dataclass(frozen=True)
class SiteFile:
    """What ``site.toml`` says: places, rules, limits of epsilon, and the public keys of other sites by name."""

    home: Path
    places: Mapping[str, Any]
    policy: Policy
    budget: Budget
    peers: Mapping[str, tuple[str, ...]]

    @classmethod
    def read(cls, home: Path, **given: Any) -> SiteFile:
        """The file of a home; ``given`` places take precedence, and without a file every rule has its default."""
        path = home / NAME
        try:
            plain = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
            raise FederationError(f"The file {str(path)!r} is not TOML: {problem}; correct it.") from None
        peers = plain.pop("peers", {})
        known = (*PLACES, *RULES, *LIMITS)
        for name in plain:
            if name not in known:
                raise FederationError(f"The file {str(path)!r} has an unknown name {name!r}; {did_you_mean(name, known)}")
        rules = {name: _checked(name, plain.get(name, about["strict"]), about) for name, about in RULES.items()}
        rules["operators"] = _public_keys("rule 'operators'", [each for each in rules["operators"] if each != ANY])
        rules["operators"] += (ANY,) * (ANY in plain.get("operators", ()))
        limits = {name: number(f"rule {name!r}", plain[name], above=0) for name in LIMITS if name in plain}
        most = limits.get("epsilon"), limits.get("epsilon_total"), limits.get("delta", DELTA)
        budget = Budget(*most, home / "privacy.json", unlimited=False)
        places = {name: plain.get(name) for name in PLACES} | {name: each for name, each in given.items() if each is not None}
        if not isinstance(peers, Mapping):
            raise FederationError(f"The table [peers] in {NAME} must have lines such as north = 'ecdsa-sha2-nistp384 AAAA...'.")
        known_peers = {name: _public_keys(f"peer {name!r}", keys) for name, keys in peers.items()}
        return cls(home, places, Policy(**rules), budget, known_peers)

    def place(self, name: str) -> Path:
        """A file that is needed."""
        path = self._path(name)
        if not path.is_file():
            raise FederationError(f"There is no {'certificate' if name == 'ca' else name} {str(path)!r}; check the path.")
        return path

    def _path(self, name: str) -> Path:
        """A path that is needed; a relative path in ``site.toml`` begins at its folder."""
        found = self.places[name]
        if not found:
            fix = f"write it into {NAME} or give --{name}" + ", or say --insecure on one machine" * (name in ("key", "ca"))
            raise FederationError(f"The site in {str(self.home)!r} has no {name}; {fix}.")
        return found if isinstance(found, Path) else self.home / str(found)

    def in_short(self, version: str) -> dict[str, Any]:
        """What ``covey status`` shows of the rules: no columns (a refusal also lists the allowed ones), no keys of others."""
        shown = ("minimum", "share", "secure", "replies", "approve", "families", "solvers")
        key = fingerprint(public_text(load_key(self.place("key")))) if self.places["key"] else ""
        limits = {"epsilon": self.budget.run, "epsilon_total": self.budget.total}
        return {"covey": version, "key": key, **{name: getattr(self.policy, name) for name in shown}, **limits}

    def reader(self) -> Read:
        """Reads the table; one that an engine holds is opened, and its rows stay there."""
        name = self.places["table_name"]
        if name is not None and (not isinstance(name, str) or not name):
            raise FederationError(f"The table_name in {NAME} must be text, such as 'visits'. Got {name!r} instead.")
        path = self._path("table")
        table, named_by = path if in_engine(path) else self.place("table"), f"table_name in {NAME}"
        if in_engine(path) or name is not None:
            open_table(table, name, named_by=named_by)  # a mistake is reported when the node starts
        return lambda spec: open_table(table, name, ids=[spec.client, spec.cluster], named_by=named_by)

    def open(self) -> Site:
        """The site, with its table and its key."""
        read, name = self.reader(), self.places["site"]
        if not isinstance(name, str) or not name:
            raise FederationError(f"The site in {str(self.home)!r} has no name; write site = '...' into {NAME} or give --site.")
        key = None if self.places["insecure"] else load_key(self.place("key"))
        return Site(name, read, self.policy, self.home, budget=self.budget, identity=key, peers=self.peers)


def _checked(name: str, value: Any, rule: Mapping[str, Any]) -> Any:
    """A value of a rule, of the type of its default."""
    kind, choices = type(rule["strict"]), CHOICES.get(name)
    if kind is tuple:
        good = isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(each, str) for each in value)
    else:
        good = type(value) is kind or (kind is float and type(value) is int)
        good = good and (kind in (bool, str) or value >= rule["least"])
    if not good:
        kinds = {tuple: "a list of texts", bool: "true or false", str: "text", int: "a whole number", float: "a number"}
        raise FederationError(f"The rule {name!r} in {NAME} must be {kinds[kind]}. Got {value!r} instead.")
    for each in value if kind is tuple else (value,):
        if choices and each not in choices:
            raise FederationError(f"The rule {name!r} in {NAME} has {each!r}; {did_you_mean(each, choices)}")
    return tuple(value) if kind is tuple else value


def _public_keys(what: str, given: Any) -> tuple[str, ...]:
    """Public keys without their comments, so that copies of them compare equal."""
    keys = [given] if isinstance(given, str) else given
    if not isinstance(keys, Sequence) or not all(isinstance(key, str) and key.count(" ") for key in keys):
        raise FederationError(f"The {what} in {NAME} must be the text of a .pub file, or a list of such texts.")
    return tuple(bare(key) for key in keys)
