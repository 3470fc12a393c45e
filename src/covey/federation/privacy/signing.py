"""Signatures with the ECDSA keys of sites and operators, which ssh-keygen makes.

A site signs its mask key of each run with the key that identifies its node, so that other sites can check that it comes from a
site that they know. An operator may sign its messages, so that a site answers only operators that it knows.
"""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from covey.errors import INSTALL_FLOWER, FederationError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey


def check_secret(path: Path) -> Path:
    """Refuse a file that is not a private key, or that other users can read."""
    if path.read_bytes()[:6] in (b"ssh-rs", b"ssh-ed", b"ecdsa-"):
        raise FederationError(f"The key {str(path)!r} is the public half; give the private half, the file without .pub.")
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise FederationError(f"The key {str(path)!r} is open to other users of this machine; chmod 600 it.")
    return path


def load_key(path: Path) -> EllipticCurvePrivateKey:
    """A private key, as ``ssh-keygen -t ecdsa -b 384`` writes it, without a passphrase."""
    try:
        from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
        from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    except ImportError:
        raise FederationError(f"Keys need the package 'cryptography'; {INSTALL_FLOWER}.") from None
    text = check_secret(path).read_bytes()
    try:
        key = load_ssh_private_key(text, None)
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, EllipticCurvePrivateKey):
        raise FederationError(f"The key {str(path)!r} is not one of ssh-keygen -t ecdsa -b 384 -N ''; make one.")
    return key


def public_text(key: EllipticCurvePrivateKey) -> str:
    """The public half of a key, as in its ``.pub`` file, without the comment."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


def sign(key: EllipticCurvePrivateKey, *parts: bytes) -> str:
    """A signature of some parts, in hexadecimal."""
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
    from cryptography.hazmat.primitives.hashes import SHA384

    return key.sign(_digest(parts), ECDSA(SHA384())).hex()


def verified(public: str, signature: str, *parts: bytes) -> bool:
    """Whether a signature of these parts was made with the private half of this public key."""
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePublicKey
    from cryptography.hazmat.primitives.hashes import SHA384
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    try:
        key = load_ssh_public_key(public.encode())
        if not isinstance(key, EllipticCurvePublicKey):
            return False
        key.verify(bytes.fromhex(signature), _digest(parts), ECDSA(SHA384()))
    except (InvalidSignature, UnsupportedAlgorithm, ValueError, TypeError):
        return False
    return True


def signed_by_operator(site: str, message: bytes) -> tuple[bytes, ...]:
    """What an operator signs of a message to a site."""
    return b"message", site.encode(), message


def bare(public: str) -> str:
    """A public key without its comment, so that copies of it compare equal."""
    return " ".join(public.split()[:2])


def fingerprint(public: str) -> str:
    """A short text for people to compare; "" if there is no key."""
    return hashlib.sha256(bare(public).encode()).hexdigest()[:16] if public else ""


def _digest(parts: tuple[bytes, ...]) -> bytes:
    """Each part goes in with its length, so that different lists of parts have different digests."""
    return hashlib.sha256(b"covey 1" + b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()
