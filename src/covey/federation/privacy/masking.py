"""Secure aggregation by pairwise masks, against an honest-but-curious coordinator that colludes with no site.

Such a coordinator follows the protocol and reads all that it gets. It adds up what the sites send, and learns only the total.

Each pair of sites agrees on a secret (X25519, then HKDF-SHA256). For every exchange it draws from the secret a stream of
uniform integers modulo ``2^576`` (ChaCha20). One of the two sites adds the stream to its exact sums, the other subtracts it
(Bonawitz and others, "Practical secure aggregation", 2017, without their recovery of lost masks). Over the whole roster the
streams cancel exactly. Without the secrets of the pairs, the masked sums of a smaller set of sites cannot be distinguished from
uniform noise.

The masks protect the sums of each site against such a coordinator, and against everybody who reads the network.
``docs/explanation/what-leaves-a-site.md`` lists what they do not hide.

A stream hides one reply only. It depends on the two sites, the run, the epoch, the exchange, the roster and the question, so
that different sums get different streams. A site that is asked the same again sends the same bytes. The caller must ensure that
the name of a run is never used again, and that the same question in the same exchange has the same answer.

Masks are never revealed. When a site drops out, the exchange is repeated; or the fit starts again, as another epoch with a
smaller roster, if :func:`check_roster` allows it: no combination of totals may equal the sums of one site.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from covey.errors import INSTALL_FLOWER, FederationError, listing
from covey.exact import Exact
from covey.kernels import TOO_LARGE

KEY_BYTES = 32
MINIMUM_SITES = 2

_NONCE_BYTES = 12


@dataclass(frozen=True)
class Keys:
    """A site's X25519 key pair, 32 bytes each. The private key never leaves the site's disk and is not printed.

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
        """A new pair from the system's randomness, or the pair of a saved private key."""
        try:
            from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
        except ImportError:
            raise FederationError(f"Masks need the package 'cryptography'; {INSTALL_FLOWER}.") from None

        private = X25519PrivateKey.generate() if secret is None else X25519PrivateKey.from_private_bytes(secret)
        return cls(private.private_bytes_raw(), private.public_key().public_bytes_raw())


def check_keys(keys: Mapping[str, bytes]) -> None:
    """Refuse a public key that two sites have: a third site would add and subtract the same stream, and so send its sums bare.

    >>> check_keys({"a": bytes(32), "c": bytes(32)})
    Traceback (most recent call last):
    covey.errors.FederationError: Sites 'a' and 'c' have the same public key, so their masks would not hide ...
    """
    for one, two in combinations(sorted(keys), 2):
        if keys[one] == keys[two]:
            same = f"Sites {one!r} and {two!r} have the same public key, so their masks would not hide the sums of other sites"
            raise FederationError(f"{same}; give each site its own --home and start a new run.")


def pair_secret(own: Keys, other_public: bytes, run: str, sites: tuple[str, str] = ("", "")) -> bytes:
    """The secret of two sites in one run, 32 bytes, the same from either side; ``sites`` names this site and the other."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    try:
        shared = X25519PrivateKey.from_private_bytes(own.private).exchange(X25519PublicKey.from_public_bytes(other_public))
    except ValueError:  # a wrong length, or a point with which every secret would be the same
        size = f"{len(other_public)} bytes, expected {KEY_BYTES}"
        raise FederationError(f"The public key of site {sites[1]!r} is not valid ({size}); start a new run.") from None
    # With the names in it, two sites with the same key do not get the same secret.
    first, second = sorted([(sites[0].encode(), own.public), (sites[1].encode(), other_public)])
    return _derive(shared, b"pair", *first, *second, run.encode())


def mask(values: Exact, own: str, secrets: Mapping[str, bytes], epoch: int, exchange: int, question: bytes = b"") -> Exact:
    """A site's sums with the masks of all its pairs. Alone they are noise; those of the whole roster add up to the true total.

    Parameters
    ----------
    values : the sums
    own : this site's name
    secrets : :func:`pair_secret` with every other site of the roster, by name
    epoch, exchange : numbers, the same at all sites; never twice for different values
    question : the message to the site, or a digest of it; the same at all sites

    >>> a, b = Keys.fresh(), Keys.fresh()
    >>> secret = pair_secret(a, b.public, "run 1")
    >>> replies = {
    ...     "north": mask(Exact.of([1.5, 2.0]), "north", {"south": secret}, epoch=0, exchange=3),
    ...     "south": mask(Exact.of([0.5, -9.0]), "south", {"north": secret}, epoch=0, exchange=3),
    ... }
    >>> unmask(replies, ["north", "south"]).floats().tolist()
    [2.0, -7.0]
    """
    roster = sorted({own, *secrets})
    if own in secrets or len(roster) < MINIMUM_SITES:
        raise FederationError(f"Site {own!r} needs another site to mask its sums with; masks take two sites or more.")
    about = (_number(epoch), _number(exchange), *(name.encode() for name in roster), question)
    # Each site may use its share of the range: its size can then be hidden, and the total still cannot wrap around.
    size = np.where(values.size < TOO_LARGE // len(roster), 0, TOO_LARGE)
    masked = Exact(values.limbs, size)
    for peer, secret in secrets.items():
        noise = _stream(_derive(secret, b"mask", *about), values.limbs.shape)
        masked = masked + noise if own < peer else masked - noise
    return masked


def unmask(masked: Mapping[str, Exact], roster: Collection[str]) -> Exact:
    """The total of the masked sums of all sites of the roster, which have the same shape."""
    if set(masked) != set(roster):
        missing, others = (listing(sorted(odd)) or "none" for odd in (set(roster) - set(masked), set(masked) - set(roster)))
        wrong = f"Masks cancel only over the whole roster (missing: {missing}; not on the roster: {others})"
        raise FederationError(f"{wrong}; ask all sites of the roster again, and no others.")
    limbs = np.stack([masked[site].limbs for site in sorted(roster)])
    return Exact(limbs, np.stack([masked[site].size for site in sorted(roster)])).sum()


def seal(key: bytes, text: bytes, context: str) -> bytes:
    """Encrypt ``text`` for one other site; :func:`open_sealed` decrypts it.

    ``key`` is the :func:`pair_secret`. ``context`` says what the text is and for whom. It is not sent, and the text does not
    open with another context.

    >>> salt = seal(bytes(32), b"pepper", "salt from north to south")
    >>> open_sealed(bytes(32), salt, "salt from north to south")
    b'pepper'
    """
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    nonce = os.urandom(_NONCE_BYTES)
    return nonce + ChaCha20Poly1305(_derive(key, b"seal", context.encode())).encrypt(nonce, text, None)


def open_sealed(key: bytes, sealed: bytes, context: str) -> bytes:
    """The text that was sealed; an error, if anything was changed."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    try:
        cipher = ChaCha20Poly1305(_derive(key, b"seal", context.encode()))
        return cipher.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], None)
    except (InvalidTag, ValueError):  # ValueError: cut off within the nonce
        why = f"The sealed text ({context[:80]!r}) cannot be opened: it was changed on the way, or sealed with another key"
        raise FederationError(f"{why}; start a new run, in which the sites make new keys.") from None


def check_roster(history: Sequence[Collection[str]], roster: Collection[str]) -> None:
    """Refuse a new roster if its totals, together with those of earlier epochs, could show the sums of one site.

    The coordinator may combine the totals of all epochs. It cannot tell sites apart that took part in exactly the same epochs.
    So each site needs another one that took part in the same epochs; a site may drop out only together with another.

    >>> check_roster(["abcd"], ["a", "b"])
    >>> check_roster(["abcd"], ["a", "b", "c"])
    Traceback (most recent call last):
    covey.errors.FederationError: The fit cannot go on if only site 'd' drops out: ...
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
        why = f"The fit cannot go on if only site {gone[0]!r} drops out: the earlier total minus the new one would be its sum"
        raise FederationError(f"{why}. Start its node, then give the same command again.")
    if alone:
        why = f"From the totals of all starts of this run the sums of site {alone[0]!r} alone could be computed"
        raise FederationError(
            f"{why}, so it does not go on. Start the nodes of the missing sites, then give the same command again."
        )


def _stream(key: bytes, shape: tuple[int, ...]) -> Exact:
    """Uniform limbs of this shape; a key is used once, so the nonce may be zero."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    noise = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(8 * math.prod(shape)))
    limbs = np.frombuffer(noise, dtype="<u8").reshape(shape).astype(np.uint64)
    return Exact(limbs, np.zeros(shape[:-1], dtype=np.int64))


def _derive(secret: bytes, purpose: bytes, *about: bytes) -> bytes:
    """A key for one purpose; each part of ``about`` goes in with its length, so that different lists give different keys."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    info = b"covey masking 1" + b"".join(_number(len(part)) + part for part in (purpose, *about))
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=info).derive(secret)


def _number(n: int) -> bytes:
    return n.to_bytes(8, "little")
