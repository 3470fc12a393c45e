"""What comes back from sites: whether it is a reply at all, and whether it can be added to those of other sites."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np

from covey.errors import FederationError
from covey.exact import Exact
from covey.federation.operator.agreement import apart_from_most
from covey.federation.wire.letters import Letter, Refusal, join
from covey.federation.wire.transport import Failure
from covey.records import RecordError, decode, outline


class SiteLost(FederationError):  # noqa: N818 - an event, of which an error is only one outcome
    """Sites that do not answer, or answer what cannot be used; ``known`` if the journal already says that the run left them."""

    def __init__(self, sites: Mapping[str, str], *, known: bool = False) -> None:
        self.sites, self.known = dict(sites), known
        said = "; ".join(f"{site!r} {why}" for site, why in self.sites.items())
        super().__init__(f"Lost {'site' if len(self.sites) == 1 else 'sites'} {said}.")


@dataclass(frozen=True)
class Trouble:
    """A reply that is none; ``behind`` is the last exchange of a site that has lost its memory."""

    why: str
    behind: int | None = None
    hopeless: bool = False


def read(letter: bytes, reply: bytes | Failure | None) -> Letter | Trouble:
    """The reply to a letter, or why it is none."""
    if reply is None:
        return Trouble("sent no reply")
    if isinstance(reply, Failure):
        return Trouble(f"did not answer ({reply.reason}: {reply.detail})")
    try:
        found = decode(reply)
    except RecordError as problem:
        return Trouble(f"sent bytes that cannot be read ({problem})")
    asked = decode(letter)
    if not isinstance(found, Letter):
        return Trouble("sent something that is no letter")
    if isinstance(found.body, Refusal):
        return _refused(found.body)
    if (found.run, found.epoch, found.exchange) != (asked.run, asked.epoch, asked.exchange):
        return Trouble(f"answered another letter (exchange {found.exchange} of epoch {found.epoch})")
    return found


def _refused(refusal: Refusal) -> Trouble:
    if refusal.reason == "behind":
        return Trouble("has lost its memory of the run", behind=refusal.exchange)
    if refusal.reason == "stale":
        return Trouble(f"is ahead of the coordinator ({refusal.sentence}); start a new run")
    if refusal.reason == "broken":
        return Trouble(f"failed while it answered ({refusal.sentence})")
    return Trouble(refusal.sentence, hopeless=True)


def check_alike(replies: Mapping[str, Any]) -> None:
    """Refuse a reply that is unlike the others, or holds what is no number; these never meet the sums of other sites."""
    for site, reply in replies.items():
        if _unsound(reply):
            raise SiteLost({site: "sent a number that is not finite; look there at columns with very large values"})
    outlines = {site: outline(reply) for site, reply in replies.items()}
    odd = apart_from_most(outlines)
    if odd:
        raise SiteLost(dict.fromkeys(odd, "sent a reply of another form or shape than the other sites"))


def seen(site: str, masked: Any) -> Any:
    """What can be seen of a masked reply: its form, and which of its numbers are not finite; the others are zero here."""
    try:
        skeleton, numbers = masked
        return join(skeleton, Exact(np.zeros_like(numbers.limbs), numbers.size))
    except (RecordError, AttributeError, KeyError, OverflowError, TypeError, ValueError):
        raise SiteLost({site: "sent a masked reply that cannot be read"}) from None


def _unsound(value: Any) -> bool:
    """Whether any number is not finite that should be: a bound may be infinite, and so may the value of a step too far.

    An exact sum that is not a number says so itself, and its solver explains it.
    """
    if isinstance(value, float):
        return not np.isfinite(value)
    if isinstance(value, np.ndarray):
        return value.dtype.kind == "f" and not np.isfinite(value).all()
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return any(_unsound(each) for each in value)
    if isinstance(value, Exact) or not (is_dataclass(value) or hasattr(value, "_fields")):
        return False
    if not is_dataclass(value):
        return any(_unsound(each) for each in value)
    free = [part.name for part in fields(value) if part.metadata.get("least") or part.metadata.get("overflows")]
    if any(isinstance(getattr(value, name), float) and np.isnan(getattr(value, name)) for name in free):
        return True
    return any(_unsound(getattr(value, part.name)) for part in fields(value) if part.name not in free)
