"""A site's part in secure aggregation: its keys of a run, what it shares with each other site, and its masked replies."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from covey.errors import FederationError
from covey.federation.privacy.masking import Keys, check_keys, check_roster, mask, open_sealed, pair_secret, seal
from covey.federation.site.runs import SiteRun
from covey.federation.wire.agreement import Agree, SealedSalts
from covey.federation.wire.letters import Letter, split
from covey.records import encode


def with_key(run: SiteRun) -> SiteRun:
    """The run with a private key of this site."""
    return run if run.key else replace(run, key=Keys.fresh().private.hex())


def public_key(run: SiteRun) -> str:
    """The public half, in hexadecimal; "" without a key."""
    return Keys.fresh(bytes.fromhex(run.key)).public.hex() if run.key else ""


def with_salt(run: SiteRun) -> SiteRun:
    """The run with a key of the clients' tags."""
    return run if run.salt else replace(run, salt=secrets.token_hex(16))


def sealed_salts(site: str, name: str, run: SiteRun, keys: Mapping[str, str]) -> SealedSalts:
    """The key of the tags, sealed for each other site."""
    shared = _shared(site, name, run, keys)
    return SealedSalts({other: seal(key, bytes.fromhex(run.salt), f"salt for {other}").hex() for other, key in shared.items()})


def joined_under_masks(site: str, name: str, run: SiteRun, agreed: Agree) -> SiteRun:
    """Check the keys and the roster that were agreed on; the run with the key of the tags, opened."""
    check_keys({other: bytes.fromhex(key) for other, key in agreed.keys.items()})
    if agreed.keys.get(site) != public_key(run):
        raise FederationError(f"Site {site!r} no longer has its key of this run; start a new run.")
    if set(agreed.keys) != set(agreed.roster):
        raise FederationError("The keys that came with the roster are not those of its sites; start a new run.")
    check_roster(run.rosters, agreed.roster)
    if not agreed.salt or run.salt:
        return run
    maker, _, text = agreed.salt.rpartition(":")
    shared = _shared(site, name, run, agreed.keys)
    return replace(run, salt=open_sealed(shared[maker], bytes.fromhex(text), f"salt for {site}").hex())


def masked(site: str, asked: Letter, run: SiteRun, reply: Any) -> Any:
    """A reply as it leaves: under masks, if that was agreed."""
    agreed = run.agreed
    if agreed is None or not agreed.keys or reply is None:
        return reply
    # The one at the end is a proof: over all sites these add up to their number, if the masks cancel.
    skeleton, numbers = split((_without_least(reply), 1.0))
    about = None if isinstance(asked.body, Agree) else asked.body  # an agreement holds a seal for this site alone
    question = hashlib.sha256(encode(replace(asked, mute=False, body=about))).digest()
    shared = _shared(site, asked.run, run, agreed.keys)
    return (skeleton, mask(numbers, site, shared, asked.epoch, asked.exchange, question))


def _shared(site: str, name: str, run: SiteRun, keys: Mapping[str, str]) -> dict[str, bytes]:
    """What this site and each other share in a run and nobody else knows."""
    own = Keys.fresh(bytes.fromhex(run.key))
    return {other: pair_secret(own, bytes.fromhex(key), name) for other, key in keys.items() if other != site}


def _without_least(reply: Any) -> Any:
    """A reply without bounds that are the least over clients: they do not add, so no mask could hide them."""
    if is_dataclass(reply) and not isinstance(reply, type):
        least = {part.name: 0.0 for part in fields(reply) if part.metadata.get("least")}
        return replace(reply, **least)
    return reply
