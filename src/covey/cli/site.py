"""``covey site``: what the owner of a site sees and decides. It runs at the site and sends nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from covey.cli.node import Home

if TYPE_CHECKING:
    from covey.federation.site.approval import Approvals
    from covey.federation.site.file import SiteFile
    from covey.federation.site.release import WeakSum
    from covey.problem.problem import Problem
    from covey.tables.rows import GroupedData

Question = Annotated[
    str | None, typer.Argument(help="The id of the question, as 'covey site runs' shows it; by default the one that waits.")
]


def runs(
    question: Annotated[str | None, typer.Argument(help="Show one question in full, with the counts of its cells.")] = None,
    home: Home = Path(),
) -> None:
    """List what operators have asked this site for, and what was decided."""
    from covey.federation.wire.codec import printable

    file, approvals = _opened(home)
    kept = approvals.read()
    if question is None:
        for name, asked in kept["questions"].items():
            print(printable(f"{name}  {asked['decision']:8}  {asked['asked']}  {asked['spec']['formula']}"))
        joined, most = len(kept["runs"]), file.policy.runs
        print(
            f"{len(kept['questions'])} questions; this site has joined {joined} of the {most} runs that its rule 'runs' allows"
        )
        return
    if question not in kept["questions"]:
        from covey.errors import FederationError, did_you_mean

        raise FederationError(f"There is no question {question!r}; {did_you_mean(question, kept['questions'])}")
    print(in_words(file, kept["questions"][question]))


def approve(question: Question = None, home: Home = Path()) -> None:
    """Approve a question; the approval is good for one run."""
    _decide(home, question, "approved")


def refuse(question: Question = None, home: Home = Path()) -> None:
    """Refuse a question. 'covey site approve' can change this later."""
    _decide(home, question, "refused")


def log(
    home: Home = Path(),
    verify: Annotated[
        bool, typer.Option("--verify", help="Check that no line before the last was changed, removed or inserted.")
    ] = False,
    last: Annotated[int, typer.Option(help="How many lines to print.")] = 20,
) -> None:
    """Print the audit log: one line of JSON for each message and each decision."""
    from covey.federation.site.audit import AuditLog

    audit = AuditLog(home)
    if verify:
        lines, end = audit.verify()
        print(f"{lines} lines, each follows from the one before it; the last has the hash {end}")
        return
    for line in audit.lines()[-last:] if last > 0 else ():
        print(line)


def check(
    problem: Annotated[Path, typer.Argument(help="File with settings of a fit as JSON: formula, client, cluster and others.")],
    home: Home = Path(),
) -> None:
    """Say what would leave this site in a fit, and which sums may not, since too few clients contribute or one dominates.

    [bold]Example[/bold]   covey site check problem.json --home north
    """
    from covey.errors import FederationError
    from covey.problem.problem import Spec, resolve

    try:
        settings = json.loads(problem.read_text(encoding="utf-8"))
        draft = resolve(Spec.from_json(settings))
    except (ValueError, TypeError) as wrong:
        if type(wrong).__module__ == "covey.errors":
            raise
        raise FederationError(f"The file {str(problem)!r} does not hold settings of a fit as JSON; correct it.") from None
    file = _opened(home)[0]
    file.policy.check_problem(draft)
    print(_sums_in_words(file, draft))


def _opened(home: Path) -> tuple[SiteFile, Approvals]:
    from covey.federation.site.approval import Approvals
    from covey.federation.site.file import SiteFile

    file = SiteFile.read(home)
    return file, Approvals(home, file.policy)


def _decide(home: Path, question: str | None, decision: str) -> None:
    from covey.errors import FederationError, listing
    from covey.federation.site.audit import AuditLog

    approvals = _opened(home)[1]
    if question is None:
        waiting = [name for name, asked in approvals.read()["questions"].items() if asked["decision"] == "waiting"]
        if not waiting:
            raise FederationError("No question waits.")
        if len(waiting) > 1:
            raise FederationError(f"Say which question is meant; {listing(waiting)} wait.")
        question = waiting[0]
    approvals.decide(question, decision)
    AuditLog(home).add(decision, question=question)
    print(f"question {question} is {decision}")


def in_words(file: SiteFile, asked: dict[str, Any]) -> str:
    """A question in words: who asks, for which fit, from which columns, with which sums, and the counts of its cells."""
    from covey.federation.privacy.differential import spent
    from covey.federation.privacy.signing import fingerprint
    from covey.federation.wire.codec import printable
    from covey.problem.problem import Problem

    design: dict[str, Any] = {"design": None, "classes": None, "has_offset": False}
    draft = Problem.from_json({"spec": asked["spec"], "formula": asked["formula"], **design})
    spec = draft.spec
    noise = "without noise"
    if (private := asked["private"]) is not None:
        cost = spent([(private["noise"], private["rounds"])], file.budget.delta)
        noise = f"with noise: epsilon {cost:.3g} at delta {file.budget.delta:g}, in {private['rounds']} releases"
    penalties = "learned from the data" if spec.learns else "given"
    lines = [
        f"asked by       {fingerprint(asked['operator']) or 'an operator without a key'}, {asked['asked']}",
        f"fit            {spec.formula}, family {spec.family}, solver {spec.solver}, penalties {penalties}",
        f"clients        by column {spec.client!r}, grouped by {spec.cluster!r}",
        f"sums           {'masked' if asked['secure'] else 'not masked'}, {noise}",
        f"how often      at most {file.policy.messages} messages",
    ]
    return "\n".join([*map(printable, lines), "", _sums_in_words(file, draft, private=asked["private"] is not None)])


def _sums_in_words(file: SiteFile, draft: Problem, *, private: bool = False) -> str:
    """The columns and cells of a fit at this site, the sums that may not leave, and groupings with which all may.

    In a private run, whose noise hides single clients, only the numbers of clients are checked.
    """
    from dataclasses import replace

    from covey.errors import FederationError
    from covey.federation.site.engine import draft_rows, table_for
    from covey.federation.site.release import NUMBER, weak_sums
    from covey.federation.site.table import profile_of
    from covey.problem.rows import used_columns

    read, policy, moments = file.reader(), file.policy, draft.spec.standardize

    def weak_sums_of(data: GroupedData) -> list[WeakSum]:
        found = weak_sums(data, policy.minimum, 1.0 if private else policy.share, moments=moments)
        return [each for each in found if not private or each.term == NUMBER]

    data, _ = draft_rows(read(draft.spec), draft)
    tree = data.hierarchy
    lines = [f"columns used   {', '.join(used_columns(draft))}"]
    lines += [f"terms          {', '.join(data.terms)}"]
    sizes = [f"{cell}: {n} clients" for cell, n in zip(tree.cluster_ids.to_list(), tree.sizes.tolist(), strict=True)]
    lines += [f"cells          {len(sizes)}: {'; '.join(sizes[:12])}{'; ...' if len(sizes) > 12 else ''}"]
    kinds = "vectors" if policy.replies == "vectors" else "vectors, and matrices of products of terms"
    first = ["keyed hashes of ids", "numbers of clients", "names of clusters", "types of columns"]
    first += [] if private else ["categories", "classes", "numbers of rows", "the sum of y"]
    first += ["sums of columns and of their squares"] if moments else []
    first += ["sums for center, scale and poly"] if draft.formula is not None and draft.formula.right.transforms else []
    first += ["numbers of missing values"] if draft.spec.na == "drop" and not private else []
    lines += [f"leaves first   {', '.join(first)}"]
    noise = ", with noise" if private else ""
    lines += [f"then leaves    sums over the clients of a cell or of the site{noise}: {kinds}; no rows"]
    lines += [] if private else ["               without masks also a lower bound on the curvature of the clients' losses"]
    refused = ""
    try:
        profile_of(table_for(read(draft.spec), draft, private=private), draft, "", policy.minimum, private=private)
    except FederationError as problem:
        refused = str(problem)
        lines += [refused]
    weak = weak_sums_of(data)
    rule = f"at least {policy.minimum} clients in each"
    rule += "" if private else f", none with more than {policy.share:.0%} of a sum of squares"
    if refused and not weak:
        return "\n".join(lines)
    if not weak:
        return "\n".join([*lines, f"All sums may leave ({rule})."])
    lines += [f"{len(weak)} sums may not leave ({rule}):", *(f"  {each}" for each in weak[:20]), "  ..." * (len(weak) > 20)]
    fine = []
    for group in (*(policy.groups or ()), None):
        if group != draft.spec.cluster:
            coarse = replace(draft, spec=replace(draft.spec, cluster=group))
            found, _ = draft_rows(read(coarse.spec), coarse)
            fine += [str(group)] * (not weak_sums_of(found))
    lines += [f"Groupings with which all may leave: {', '.join(fine).replace('None', 'no groups') or 'none of those allowed'}."]
    return "\n".join(line for line in lines if line)
