"""What comes back from sites: whether it can be used, and the sum over sites."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import reduce
from operator import add
from typing import Any

import numpy as np

from covey.errors import FederationError
from covey.exact import Exact
from covey.federation.operator.agreement import apart_from_most
from covey.federation.privacy.masking import unmask
from covey.federation.wire.letters import Letter, Refusal, join
from covey.federation.wire.transport import Failure
from covey.records import RecordError, decode, outline


class SiteLost(FederationError):  # noqa: N818 - an event, of which an error is only one outcome
    """Sites that do not answer, or answer what cannot be used; ``in_journal`` if the run has gone on without them before."""

    def __init__(self, sites: Mapping[str, str], *, in_journal: bool = False) -> None:
        self.sites, self.in_journal = dict(sites), in_journal
        why = "; ".join(f"{site!r} {reason}" for site, reason in self.sites.items())
        super().__init__(f"Lost {'site' if len(self.sites) == 1 else 'sites'} {why}.")


@dataclass(frozen=True)
class Unusable:
    """An unusable reply.

    Attributes
    ----------
    why : in words that follow the name of the site
    last_exchange : of a site that has lost its memory, the last that it knows of; else None
    final : whether asking again cannot help
    """

    why: str
    last_exchange: int | None = None
    final: bool = False


def read(letter: bytes, reply: bytes | Failure | None) -> Letter | Unusable:
    """The reply to a letter, or why it cannot be used."""
    if reply is None:
        return Unusable("sent no reply")
    if isinstance(reply, Failure):
        return Unusable(f"did not answer ({reply.reason}: {reply.detail})")
    try:
        found = decode(reply)
    except RecordError as problem:
        return Unusable(f"sent bytes that cannot be read ({problem})")
    asked = decode(letter)
    if not isinstance(found, Letter):
        return Unusable("sent something that is not a letter")
    if isinstance(found.body, Refusal):
        return _refused(found.body)
    if (found.run, found.epoch, found.exchange) != (asked.run, asked.epoch, asked.exchange):
        return Unusable(f"answered another letter (exchange {found.exchange} of epoch {found.epoch})")
    return found


def _refused(refusal: Refusal) -> Unusable:
    if refusal.reason == "behind":
        return Unusable("has lost its memory of the run", last_exchange=refusal.exchange)
    if refusal.reason == "stale":
        return Unusable(f"is ahead of the coordinator ({refusal.sentence}); start a new run")
    if refusal.reason == "broken":
        return Unusable(f"failed while it answered ({refusal.sentence})")
    return Unusable(refusal.sentence, final=True)


def total_of(replies: Mapping[str, Any], roster: Collection[str], *, secure: bool) -> Any:
    """The sum over sites, in the order of their names; what cannot be added is not."""
    if all(body is None for body in replies.values()):
        return None
    check_alike({site: visible_part(site, body) for site, body in replies.items()} if secure else replies)
    if not secure:
        return reduce(add, replies.values())
    skeleton = next(iter(replies.values()))[0]
    reply, ones = join(skeleton, unmask({site: body[1] for site, body in replies.items()}, roster))
    if ones != len(replies):
        raise FederationError("The masks of the sites do not cancel; start a new run.")
    return reply


def check_alike(replies: Mapping[str, Any]) -> None:
    """Refuse a reply that is unlike the others, or has a number that is not finite; it is never added to those of others."""
    for site, reply in replies.items():
        if _has_nonfinite(reply):
            raise SiteLost({site: "sent a number that is not finite; look there at columns with very large values"})
    outlines = {site: outline(reply) for site, reply in replies.items()}
    odd = apart_from_most(outlines)
    if odd:
        raise SiteLost(dict.fromkeys(odd, "sent a reply of another form or shape than the other sites"))


def visible_part(site: str, masked: Any) -> Any:
    """What can be seen of a masked reply: its form, and which of its numbers are not finite; the others are zero here."""
    try:
        skeleton, numbers = masked
        return join(skeleton, Exact(np.zeros_like(numbers.limbs), numbers.size))
    except (RecordError, AttributeError, KeyError, OverflowError, TypeError, ValueError):
        raise SiteLost({site: "sent a masked reply that cannot be read"}) from None


def _has_nonfinite(value: Any) -> bool:
    """Whether any number is not finite that should be: a bound may be infinite, and so may the value of a step too far.

    An exact sum that is not a number says so itself, and its solver explains it.
    """
    if isinstance(value, float):
        return not np.isfinite(value)
    if isinstance(value, np.ndarray):
        return value.dtype.kind == "f" and not np.isfinite(value).all()
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return any(_has_nonfinite(each) for each in value)
    if isinstance(value, Exact) or not (is_dataclass(value) or hasattr(value, "_fields")):
        return False
    if not is_dataclass(value):
        return any(_has_nonfinite(each) for each in value)
    free = [part.name for part in fields(value) if part.metadata.get("least") or part.metadata.get("overflows")]
    if any(isinstance(getattr(value, name), float) and np.isnan(getattr(value, name)) for name in free):
        return True
    return any(_has_nonfinite(getattr(value, part.name)) for part in fields(value) if part.name not in free)
