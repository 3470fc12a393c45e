"""Which runs a site takes part in: questions for its owner, their answers, and the runs that have joined.

A question is who asks for what: the operator, the specification and the formula, masks and noise. It waits until the owner
approves or refuses it. An approval is good for one run. All is in ``home/questions.json``, which only the holder of the site's
lock may change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from covey.errors import FederationError, did_you_mean
from covey.federation.site.policy import Policy, refusal
from covey.federation.site.state import Document, locked


class Waiting(FederationError):  # noqa: N818 - an event
    """The owner of the site has not decided yet."""


class Approvals:
    """Questions and runs of a site, in its home or in this object."""

    def __init__(self, home: Path | None, policy: Policy) -> None:
        self.home, self.policy = home, policy
        self._file = Document(None if home is None else home / "questions.json", {"runs": {}, "questions": {}})

    def admit(self, run: str, question: Mapping[str, Any], *, join: bool, going_on: bool = False) -> None:
        """Let a run begin (``join``: take part), or refuse it; a question that the owner has not answered waits.

        ``going_on`` says that the site remembers this run. One that it has joined and remembers no more, since it has ended or
        was given up, is over: it would be another run without another approval.
        """
        kept, name = self.read(), question_id(question)
        if kept["runs"].get(run, name) != name:
            raise FederationError("This site has joined this run for another problem; start a new run.")
        if run in kept["runs"]:
            if join and not going_on:
                raise FederationError("This run has ended at this site, or the site has lost its state; start a new run.")
            return
        if self.policy.runs is not None and len(kept["runs"]) >= self.policy.runs:
            raise refusal("runs", f"This site has taken part in {len(kept['runs'])} runs", "raise the number")
        if self.policy.approve != "policy":
            now = datetime.now(UTC).isoformat(timespec="seconds")
            asked = kept["questions"].setdefault(name, {**question, "asked": now, "decision": "waiting"})
            if asked["decision"] == "used":
                asked |= {"asked": now, "decision": "waiting"}
            if asked["decision"] == "refused":
                raise FederationError(f"The owner of this site has refused question {name}; ask for something else.")
            if asked["decision"] == "waiting":
                self._file.write(kept)
                raise Waiting(f"Its owner has not decided yet; at the site: covey site approve {name} --home FOLDER.")
            if join:
                asked["decision"] = "used"
        if join:
            kept["runs"][run] = name
        self._file.write(kept)

    def decide(self, name: str, decision: str) -> None:
        """Write down the owner's decision, ``approved`` or ``refused``; if the node is answering, after that."""
        with locked(self.home):
            kept = self.read()
            if name not in kept["questions"]:
                raise FederationError(f"There is no question {name!r}; {did_you_mean(name, kept['questions'])}")
            kept["questions"][name]["decision"] = decision
            self._file.write(kept)

    def read(self) -> dict[str, Any]:
        """Questions by their id, and the question of each run that has joined."""
        return self._file.read()


def question_id(question: Mapping[str, Any]) -> str:
    """A short name of a question, which depends on everything in it."""
    return hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()[:12]
