"""Pairwise masks: the coordinator adds up what sites send and learns the total, and nothing else of any site's part.

Each pair of sites agrees on a secret (X25519, then HKDF-SHA256) and draws from it, for every exchange, a stream of uniform
integers modulo ``2^576`` (ChaCha20). One of the two adds the stream to its exact sums, the other subtracts it (Bonawitz and
others, "Practical secure aggregation", 2017, without their recovery of lost masks). Over the whole roster the streams cancel
exactly; any smaller set of masked vectors is uniform noise.

What is protected: each site's part, against a coordinator that reads everything but follows the protocol and shares no secrets
with a site, and against everybody who reads the network. What is not:

- A total is a total. With two sites each of them knows the other's part by subtraction, and a coordinator that works with all
  sites but one knows that one's. Rosters of two are allowed: the coordinator alone still learns only the total.
- Public keys travel through the coordinator, so one that cheats could put its own in their place and read everything.
- The shape of a message is seen, and which of its values are not finite or, with ``n`` limbs, ``2^(32 n - 2)`` or more.

A stream hides one message only. It is bound to the run, the epoch, the number of the exchange, the roster and the question, so
that other plaintexts meet other streams; a site that is asked the same again sends the same bytes. What the caller must
ensure: a run's name is never used again, and the same question in the same exchange has the same answer.

Masks are never revealed. When a site drops out, the exchange is asked again; or the fit starts anew, as another epoch with a
smaller roster, if :func:`check_roster` lets it: no combination of totals may be one site's part. The same holds between runs on
the same data, for which a site may pass the epochs of earlier runs as well.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from covey.errors import FederationError, listing
from covey.exact import Exact
from covey.kernels import TOO_LARGE

KEY_BYTES = 32
MINIMUM_SITES = 2

_NONCE_BYTES, _TAG_BYTES = 12, 16


@dataclass(frozen=True)
class Keys:
    """A site's X25519 key pair, 32 bytes each; the private one never leaves its disk, nor is it printed.

    >>> a, b = Keys.fresh(bytes(range(32))), Keys.fresh()
    >>> a.public.hex()[:16]
    '8f40c5adb68f2562'
    >>> pair_secret(a, b.public, "run 1") == pair_secret(b, a.public, "run 1")
    True
    """

    private: bytes = field(repr=False)
    public: bytes

    @classmethod
    def fresh(cls, secret: bytes | None = None) -> Keys:
        """A new pair from the system's randomness, or the pair that belongs to a private key kept before."""
        _needs_cryptography()
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        if secret is not None and len(secret) != KEY_BYTES:
            raise FederationError(
                f"A site's private key has {KEY_BYTES} bytes. Got {len(secret)}; make a new one with this site's node."
            )
        private = X25519PrivateKey.generate() if secret is None else X25519PrivateKey.from_private_bytes(secret)
        return cls(private.private_bytes_raw(), private.public_key().public_bytes_raw())


def pair_secret(own: Keys, other_public: bytes, run: str) -> bytes:
    """What two sites share in one run and nobody else knows; 32 bytes, the same from either side."""
    _needs_cryptography()
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    try:
        shared = X25519PrivateKey.from_private_bytes(own.private).exchange(X25519PublicKey.from_public_bytes(other_public))
    except ValueError:  # a wrong length, or a point with which every secret would be the same
        raise FederationError(f"{other_public.hex()!r} is not a site's public key; fetch it from its site again.") from None
    first, second = sorted((own.public, other_public))
    return _derive(shared, b"pair", first, second, run.encode())


def check_keys(public: Mapping[str, bytes]) -> None:
    """Refuse keys, by site, that cannot be right.

    >>> check_keys({"north": bytes(31) + b"a", "south": bytes(31) + b"a"})
    Traceback (most recent call last):
    covey.errors.FederationError: Sites 'north' and 'south' have the same key; make a new one at one of them.
    """
    owner: dict[bytes, str] = {}
    for site, key in public.items():
        if len(key) != KEY_BYTES:
            raise FederationError(
                f"The public key of site {site!r} has {len(key)} bytes instead of {KEY_BYTES}; fetch it from the site again."
            )
        if key in owner:
            raise FederationError(f"Sites {owner[key]!r} and {site!r} have the same key; make a new one at one of them.")
        owner[key] = site


def mask(values: Exact, own: str, secrets: Mapping[str, bytes], epoch: int, exchange: int, question: bytes = b"") -> Exact:
    """A site's sums under the masks of all its pairs; alone they are noise, and the roster's add up to the true total.

    Parameters
    ----------
    own : this site's name
    secrets : by name of every other site of the roster, :func:`pair_secret` with it
    epoch, exchange : numbers, the same at all sites; never twice for different values
    question : what the site is asked, or a digest of it; the same at all sites

    >>> a, b = Keys.fresh(), Keys.fresh()
    >>> secret = pair_secret(a, b.public, "run 1")
    >>> letters = {
    ...     "north": mask(Exact.of([1.5, 2.0]), "north", {"south": secret}, epoch=0, exchange=3),
    ...     "south": mask(Exact.of([0.5, -9.0]), "south", {"north": secret}, epoch=0, exchange=3),
    ... }
    >>> unmask(letters, ["north", "south"]).floats().tolist()
    [2.0, -7.0]
    """
    roster = sorted({own, *secrets})
    if own in secrets or len(roster) < MINIMUM_SITES:
        raise FederationError(
            f"Site {own!r} needs another site to mask its sums with; a fit under masks takes two sites or more."
        )
    about = (_number(epoch), _number(exchange), _names(roster), question)
    # A share of the room for each site: its size may then be hidden, and the total still cannot wrap around.
    size = np.where(values.size < TOO_LARGE // len(roster), 0, TOO_LARGE)
    masked = Exact(values.limbs, size)
    for peer, secret in secrets.items():
        noise = _stream(_derive(secret, b"mask", *about), values.limbs.shape)
        masked = masked + noise if own < peer else masked - noise
    return masked


def unmask(masked: Mapping[str, Exact], roster: Collection[str]) -> Exact:
    """The total of what all sites of the roster sent; without any one of them there is none."""
    if missing := sorted(set(roster) - set(masked)):
        raise FederationError(f"No answer from {listing(missing)}: the masks cancel only over the whole roster; ask again.")
    if others := sorted(set(masked) - set(roster)):
        raise FederationError(f"Answers from {listing(others)}, not in this epoch's roster: leave them out.")
    shapes = {site: masked[site].shape for site in sorted(roster)}
    for site, shape in shapes.items():
        if shape != shapes[min(shapes)]:
            raise FederationError(
                f"Site {site!r} sent values of shape {shape}, others of {shapes[min(shapes)]}; is its covey the same?"
            )
    limbs = np.stack([masked[site].limbs for site in sorted(roster)])
    return Exact(limbs, np.stack([masked[site].size for site in sorted(roster)])).sum()


def seal(key: bytes, text: bytes, context: str) -> bytes:
    """``text`` for one other site, to travel through those who must not read it; :func:`open_sealed` opens it.

    ``key`` is the :func:`pair_secret`. ``context`` says what this is, from whom and to whom; it is not in the letter, and with
    another one the letter does not open.

    >>> salt = seal(bytes(32), b"pepper", "salt from north to south")
    >>> open_sealed(bytes(32), salt, "salt from north to south")
    b'pepper'
    """
    _needs_cryptography()
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    nonce = os.urandom(_NONCE_BYTES)
    return nonce + ChaCha20Poly1305(_derive(key, b"seal", context.encode())).encrypt(nonce, text, None)


def open_sealed(key: bytes, letter: bytes, context: str) -> bytes:
    """The text of a sealed letter, or an error if anything about it is not as it was sent."""
    _needs_cryptography()
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    cipher = ChaCha20Poly1305(_derive(key, b"seal", context.encode()))
    try:
        if len(letter) < _NONCE_BYTES + _TAG_BYTES:
            raise InvalidTag
        return cipher.decrypt(letter[:_NONCE_BYTES], letter[_NONCE_BYTES:], None)
    except InvalidTag:
        raise FederationError(
            f"A sealed letter ({context[:80]}) cannot be opened: it was changed on the way or sealed with another key; "
            "start the run again with the sites' present keys."
        ) from None


def check_roster(history: Sequence[Collection[str]], roster: Collection[str]) -> None:
    """Refuse a new epoch's roster if its totals, beside those of earlier epochs of the run, could show one site's part.

    The coordinator may combine the totals of all epochs. Sites that took part in exactly the same epochs cannot be told apart
    by that, so each must have at least one other that did; for one that drops out, this means another that drops out with it.

    >>> check_roster(["abcd"], ["a", "b"])
    >>> check_roster(["abcd"], ["a", "b", "c"])
    Traceback (most recent call last):
    covey.errors.FederationError: Without 'd' the totals would show its part by difference from an earlier epoch; wait ...
    """
    if len(set(roster)) < MINIMUM_SITES or len(set(roster)) < len(roster):
        raise FederationError(f"A fit under masks takes two different sites or more. Got {listing(roster)}.")
    if history and (strangers := sorted(set(roster) - set(history[0]))):
        raise FederationError(f"Not in the run's first roster: {listing(strangers)}; start a new run to take in more sites.")
    totals = [set(epoch) for epoch in history] + [set(roster)]
    present: dict[tuple[bool, ...], list[str]] = {}
    for site in sorted(set().union(*totals)):
        present.setdefault(tuple(site in total for total in totals), []).append(site)
    alone = [sites[0] for sites in present.values() if len(sites) == 1]
    if gone := [site for site in alone if site not in roster]:
        raise FederationError(
            f"Without {gone[0]!r} the totals would show its part by difference from an earlier epoch; "
            "wait for it, or leave out another site that dropped out with it."
        )
    if alone:
        raise FederationError(
            f"The totals of the run's epochs together would show the part of {alone[0]!r}; "
            "take the roster of an earlier epoch, or wait for the sites that are missing."
        )


def _stream(key: bytes, shape: tuple[int, ...]) -> Exact:
    """Uniform limbs of this shape; a key is used once, so the nonce may be zero."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    noise = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(8 * math.prod(shape)))
    limbs = np.frombuffer(noise, dtype="<u8").reshape(shape).astype(np.uint64)
    return Exact(limbs, np.zeros(shape[:-1], dtype=np.int64))


def _derive(secret: bytes, purpose: bytes, *about: bytes) -> bytes:
    """A key for one purpose; what it is about goes in with its lengths, so that no two lists read the same."""
    _needs_cryptography()
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    info = b"covey masking 1" + b"".join(_number(len(part)) + part for part in (purpose, *about))
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=info).derive(secret)


def _number(n: int) -> bytes:
    return n.to_bytes(8, "little")


def _names(roster: Sequence[str]) -> bytes:
    return hashlib.sha256(b"".join(_number(len(name.encode())) + name.encode() for name in roster)).digest()


def _needs_cryptography() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise FederationError("Masks need the package 'cryptography'; install it with: pip install 'covey[flower]'.") from None
