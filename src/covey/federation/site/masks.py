"""A site's part in secure aggregation: its key of a run, the secrets that it shares with other sites, and its masked replies."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from covey.errors import FederationError
from covey.federation.privacy.masking import Keys, check_keys, check_roster, mask, open_sealed, pair_secret, seal
from covey.federation.site.state import SiteRun
from covey.federation.wire.codec import Envelope, split
from covey.federation.wire.messages import Agree, SealedSalts
from covey.records import encode


def public_key(run: SiteRun) -> str:
    """The public key of the site in a run, in hexadecimal; "" if it has none."""
    return Keys.fresh(bytes.fromhex(run.key)).public.hex() if run.key else ""


def sealed_salts(site: str, name: str, run: SiteRun, keys: Mapping[str, str]) -> SealedSalts:
    """The key of the tags, sealed for each other site."""
    secrets = _secrets(site, name, run, keys)
    return SealedSalts({other: seal(key, bytes.fromhex(run.salt), f"salt for {other}").hex() for other, key in secrets.items()})


def join_masked_run(site: str, name: str, run: SiteRun, agreed: Agree) -> SiteRun:
    """Check the agreed keys and roster; the run with the key of the tags."""
    check_keys({other: bytes.fromhex(key) for other, key in agreed.keys.items()})
    if agreed.keys.get(site) != public_key(run):
        raise FederationError(f"Site {site!r} no longer has its key of this run; start a new run.")
    if set(agreed.keys) != set(agreed.roster):
        raise FederationError("The keys that came with the roster are not those of its sites; start a new run.")
    check_roster(run.rosters, agreed.roster)
    if not agreed.salt or run.salt:
        return run
    maker, _, text = agreed.salt.rpartition(":")
    secrets = _secrets(site, name, run, agreed.keys)
    return replace(run, salt=open_sealed(secrets[maker], bytes.fromhex(text), f"salt for {site}").hex())


def masked(site: str, asked: Envelope, run: SiteRun, reply: Any) -> Any:
    """A reply as it leaves the site: masked, if that was agreed."""
    agreed = run.agreed
    if agreed is None or not agreed.keys or reply is None:
        return reply
    # The 1.0 is a proof: over all sites it adds up to their number, if the masks cancel.
    skeleton, numbers = split((_without_bounds(reply), 1.0))
    body = None if isinstance(asked.body, Agree) else asked.body  # the salt in an agreement differs between sites
    question = hashlib.sha256(encode(replace(asked, mute=False, body=body))).digest()
    secrets = _secrets(site, asked.run, run, agreed.keys)
    return (skeleton, mask(numbers, site, secrets, asked.epoch, asked.exchange, question))


def _secrets(site: str, name: str, run: SiteRun, keys: Mapping[str, str]) -> dict[str, bytes]:
    """The secret that this site shares with each other site in a run."""
    own = Keys.fresh(bytes.fromhex(run.key))
    return {other: pair_secret(own, bytes.fromhex(key), name) for other, key in keys.items() if other != site}


def _without_bounds(reply: Any) -> Any:
    """A reply without lower bounds over clients: they do not add, so no mask could hide them."""
    if is_dataclass(reply) and not isinstance(reply, type):
        return replace(reply, **{part.name: 0.0 for part in fields(reply) if part.metadata.get("least")})
    return reply
