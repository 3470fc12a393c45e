"""The masks of a site: its key in a run, the secrets that it shares with other sites, and its masked replies."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from covey.errors import FederationError
from covey.federation.privacy.masking import Keys, check_keys, check_roster, mask, open_sealed, pair_secret
from covey.federation.privacy.signing import verified
from covey.federation.site.policy import Policy, refusal
from covey.federation.site.state import SiteRun
from covey.federation.wire.codec import Envelope, split
from covey.federation.wire.messages import Agree, DrawSalt
from covey.records import encode

Peers = Mapping[str, tuple[str, ...]]
"""Public keys of other sites by name; several while one is replaced."""


def signed(run: str, site: str, key: str) -> tuple[bytes, ...]:
    """What a site signs about its mask key."""
    return b"mask key", run.encode(), site.encode(), key.encode()


def check_peers(own: str, peers: Peers | None, policy: Policy, run: str, asked: DrawSalt | Agree) -> None:
    """Refuse mask keys that the sites named in ``[peers]`` have not signed: the coordinator could have invented them."""
    if peers is None or not (peers or policy.secure):
        return
    others, known = {name for name in asked.keys if name != own}, 0
    for name in sorted(others & peers.keys()):
        parts, signature = signed(run, name, asked.keys[name]), asked.signatures.get(name, "")
        if not any(verified(public, signature, *parts) for public in peers[name]):
            why = f"Site {name!r} signed its mask key with a key that this site does not know"
            raise refusal("peers", why, f"add the new public key of {name!r}")
        known += 1
    if known < (policy.pinned or len(others)):
        strange = sorted(others - peers.keys())
        why = f"This site does not know site {strange[0]!r}" if strange else "Too few known sites take part"
        raise refusal("peers", why, "add the public keys of more sites, or say with 'pinned' how many known sites suffice")


def public_key(run: SiteRun) -> str:
    """The public key of the site in a run, in hexadecimal; "" if it has none."""
    return Keys.fresh(bytes.fromhex(run.key)).public.hex() if run.key else ""


def join_masked_run(site: str, name: str, run: SiteRun, agreed: Agree) -> SiteRun:
    """Check the agreed keys and roster; the run with the key of the tags."""
    check_keys({other: bytes.fromhex(key) for other, key in agreed.keys.items()})
    if agreed.keys.get(site) != public_key(run):
        raise FederationError(f"Site {site!r} no longer has its key of this run; start a new run.")
    if set(agreed.keys) != set(agreed.roster):
        raise FederationError("The keys that came with the roster are not those of its sites; start a new run.")
    check_roster(run.rosters, agreed.roster)
    if run.salt:
        return run
    if not agreed.salt:
        raise FederationError("This run is masked, but no key for the hashes of clients arrived; start a new run.")
    drawing_site, _, text = agreed.salt.rpartition(":")
    shared = pair_secrets(site, name, run, agreed.keys)
    return replace(run, salt=open_sealed(shared[drawing_site], bytes.fromhex(text), f"salt for {site}").hex())


def masked(site: str, asked: Envelope, run: SiteRun, reply: Any) -> Any:
    """A reply as it leaves the site: masked, if that was agreed."""
    agreed = run.agreed
    if agreed is None or not agreed.keys or reply is None:
        return reply
    # The 1.0 is a proof: over all sites it adds up to their number, if the masks cancel.
    skeleton, numbers = split((_without_bounds(reply), 1.0))
    body = None if isinstance(asked.body, Agree) else asked.body  # the salt in an agreement differs between sites
    question = hashlib.sha256(encode(replace(asked, body=body))).digest()
    shared = pair_secrets(site, asked.run, run, agreed.keys)
    return (skeleton, mask(numbers, site, shared, asked.epoch, asked.exchange, question))


def pair_secrets(site: str, name: str, run: SiteRun, keys: Mapping[str, str]) -> dict[str, bytes]:
    """The secret that this site shares with each other site in a run."""
    own = Keys.fresh(bytes.fromhex(run.key))
    others = {other: bytes.fromhex(key) for other, key in keys.items() if other != site}
    return {other: pair_secret(own, key, name, (site, other)) for other, key in others.items()}


def _without_bounds(reply: Any) -> Any:
    """A reply without lower bounds over clients: they do not add, so no mask could hide them."""
    if is_dataclass(reply) and not isinstance(reply, type):
        return replace(reply, **{part.name: 0.0 for part in fields(reply) if part.metadata.get("least")})
    return reply
