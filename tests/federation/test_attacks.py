"""Attacks on a site by an operator who writes honest-looking formulas, repeats runs or invents sites, and what stops each."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from covey.errors import FederationError
from covey.federation.operator.operate import dry_run
from covey.federation.operator.settings import RunSettings
from covey.federation.privacy.signing import bare, public_text, sign, verified
from covey.federation.site.approval import Approvals
from covey.federation.site.audit import AuditLog
from covey.federation.site.file import SiteFile
from covey.federation.site.policy import Policy, solver_of
from covey.federation.site.release import COMBINED, Released, weak_sums
from covey.federation.site.site import Site
from covey.federation.wire.codec import Envelope, Refusal
from covey.federation.wire.messages import Abandon
from covey.federation.wire.transport import InProcess
from covey.model.files import load_model
from covey.nodes.network import Batch, Message, SetGamma, Standardise
from covey.problem.problem import resolve
from covey.problem.rows import read_rows
from covey.records import decode, encode
from covey.solvers.direct.sweep import SweepUp
from covey.tables.scaling import Scale
from covey.variance.columns import TermOrder
from covey.variance.linear_likelihood import IntegrateClients

from .sites import FaultyTransport, by_turns, fit, in_memory, kind, sites_of, spec, table

SECURE = RunSettings(retries=1, timeout=1.0, secure=True)


def patients(seed=0, clients=60, rows=6):
    """Clients in two clusters, each with several rows; ``hiv`` is one for one client, ``pid`` numbers the rows."""
    frame = table(seed, clients=clients, clusters=2, rows=rows)
    one = pl.col("client") == "c7"
    return frame.with_columns(hiv=one.cast(pl.Int64), well=(~one).cast(pl.Int64), pid=np.arange(len(frame)))


def sums_of(frame, minimum=5, share=0.6, **asked):
    data, _ = read_rows(frame, resolve(spec(**asked)))
    return list(weak_sums(data, minimum, share))


# Minimum for each sum


def test_an_honest_formula_passes_and_an_indicator_of_one_client_does_not():
    """``y ~ x + z + hiv`` carries the sum of y of the one client with hiv = 1, however large clusters and categories are."""
    frame = patients()
    assert sums_of(frame, formula="y ~ x + z") == []
    (weak,) = sums_of(frame, formula="y ~ x + z + hiv")
    assert (weak.term, weak.clients, weak.share) == ("hiv", 1, 1.0)


def test_an_indicator_of_all_clients_but_one_is_one_of_that_client():
    """With a constant it gives the indicator: the share is taken over all combinations of columns."""
    (weak,) = sums_of(patients(), formula="y ~ x + well")
    assert weak.term == COMBINED
    assert weak.share == pytest.approx(1.0)
    (weak,) = sums_of(patients(), formula="y ~ 0 + well")
    assert weak.term == COMBINED


def test_a_bump_around_one_row_an_interaction_and_weights_fail():
    frame = patients().with_columns(only=pl.when(pl.col("client") == "c3").then(1.0).otherwise(0.0))
    for asked in (
        {"formula": "y ~ 0 + exp(-100*(pid-17)**2)"},
        {"formula": "y ~ x:hiv"},
        {"formula": "y ~ x", "weights": "only"},
    ):
        found = sums_of(frame, **asked)
        assert found, asked
        assert max(weak.share for weak in found) > 0.99


def test_a_rare_combination_of_category_and_cluster_fails():
    """Every category has many clients, and so has every cluster; two clients of cluster a have the category."""
    frame = patients().with_columns(
        z=pl.when((pl.col("cluster") == "a") & ~pl.col("client").is_in(["c0", "c2"])).then(pl.lit("p")).otherwise(pl.lit("q"))
    )
    assert frame.group_by("z").agg(pl.col("client").n_unique())["client"].min() > 20
    assert {(weak.cell, weak.term, weak.clients) for weak in sums_of(frame, formula="y ~ z")} == {("a", "z[T.q]", 2)}


def test_the_largest_share_is_that_of_a_direct_search():
    """The eigenvalue bounds the share in every direction, and a search over directions comes near it."""
    data, _ = read_rows(patients(3, clients=8), resolve(spec(formula="y ~ x + z")))
    first, last = data.hierarchy.cluster_ptr[:2]
    rows = [slice(*data.client_ptr[i : i + 2]) for i in range(first, last)]
    columns = np.column_stack([data.X, data.y])
    rng = np.random.default_rng(0)
    directions = rng.normal(size=(20_000, columns.shape[1]))
    squares = np.stack([((columns[part] @ directions.T) ** 2).sum(axis=0) for part in rows])
    best = (squares.max(axis=0) / squares.sum(axis=0)).max()
    exact = next(each.share for each in weak_sums(data, 1, best - 1e-9) if each.cell == "a" and each.term == COMBINED)
    assert best <= exact <= best + 0.1


def test_a_site_refuses_such_a_run_and_names_the_sum_only_in_its_own_log(tmp_path):
    frame = patients()
    site = Site("s0", lambda _: frame, Policy(minimum=5, share=0.6), home=tmp_path)
    with pytest.raises(FederationError, match=r"rule 'minimum' in site.toml") as refused:
        fit({"s0": site}, spec(formula="y ~ x + hiv"))
    assert "hiv" not in str(refused.value)
    weak = [json.loads(line) for line in site.audit.lines() if '"weak sum"' in line]
    assert [(line["term"], line["clients"]) for line in weak] == [("hiv", 1)]
    fit({"s0": site}, spec(formula="y ~ x"))


def test_two_runs_that_differ_by_a_few_clients_are_refused(tmp_path):
    """By difference they would show these few; the same clients again, or many others, are fine."""
    frame = patients()
    policy = Policy(minimum=5)

    def run(rows, home=tmp_path, **asked):
        fit({"s0": Site("s0", lambda _: rows, policy, home=home)}, spec(formula="y ~ x", **asked))

    run(frame)
    run(frame)
    without = frame.filter(pl.col("client") != "c7")
    with pytest.raises(FederationError, match="differ by fewer than 5 from those of an earlier run"):
        run(without)
    moved = frame.with_columns(cluster=pl.when(pl.col("client") == "c7").then(pl.lit("a")).otherwise("cluster"))
    with pytest.raises(FederationError, match="by fewer than 5 from those of an earlier run"):
        run(moved)
    with pytest.raises(FederationError, match="by fewer than 5 from those of an earlier run"):  # a row more of one client
        run(pl.concat([frame, frame.filter(pl.col("client") == "c7").head(1)]))
    with pytest.raises(FederationError, match="by fewer than 5 from those of an earlier run"):  # of four clients
        run(pl.concat([frame, frame.filter(pl.col("client").is_in(["c7", "c8", "c9", "c10"])).group_by("client").head(1)]))
    # A weight of zero leaves a client out.
    with pytest.raises(FederationError, match="by fewer than 5 from those of an earlier run"):
        run(frame.with_columns(w=(pl.col("client") != "c7").cast(pl.Float64)), weights="w")
    run(frame.filter(~pl.col("client").is_in([f"c{i}" for i in range(20)])))
    kept = (tmp_path / "released.json").read_text()
    assert '"c7"' not in kept
    run(without, tmp_path / "elsewhere")


def test_two_starts_of_one_run_are_compared_too(tmp_path):
    """The table may change between them; every start is kept, so that a later one is compared with all."""
    frame, policy, released = patients(), Policy(minimum=5), Released(tmp_path)
    asked = resolve(spec(formula="y ~ x"))

    def start(rows):
        released.admit("run", read_rows(rows, asked)[0], policy)

    half = frame.filter(~pl.col("client").is_in([f"c{i}" for i in range(20)]))
    for rows in (frame, frame, half, frame):
        start(rows)
    for rows in (frame, half):
        with pytest.raises(FederationError, match="by fewer than 5 from those of an earlier run"):
            start(rows.filter(pl.col("client") != "c27"))


def test_runs_are_compared_by_clients_whose_ids_are_nested_in_clusters(tmp_path):
    """Two clients with one id and as many rows are two: without one of them the run differs by one."""
    half = pl.col("client").str.slice(1).cast(pl.Int64) // 2
    frame = patients().with_columns(client=pl.concat_str(pl.lit("c"), half)).group_by("cluster", "client").head(2)
    fits = {"formula": "y ~ x", "nested": True}
    fit({"s0": Site("s0", lambda _: frame, Policy(minimum=5), home=tmp_path)}, spec(**fits))
    without = frame.filter((pl.col("client") != "c7") | (pl.col("cluster") == "a"))
    with pytest.raises(FederationError, match="by fewer than 5 from those of an earlier run"):
        fit({"s0": Site("s0", lambda _: without, Policy(minimum=5), home=tmp_path)}, spec(**fits))


# A changed coordinator


def joined_site(frame, asked, **policy):
    """A site joins a run of a changed coordinator; a function that sends it messages of that run."""
    carrier = FaultyTransport(sites_of({"s0": frame}))
    fit({"s0": None}, asked, carrier)
    agree = next(decode(message) for _, message in carrier.messages if kind(decode(message)) == "agree")
    site = Site("s0", lambda _: frame, Policy(**{"minimum": 5, "share": 0.6, **policy}))
    assert isinstance(decode(site.answer(encode(agree))).body, tuple)

    def send(*messages, exchange=1):
        asked = Envelope(agree.run, agree.epoch, exchange, Batch(messages), after=exchange - 1)
        return decode(site.answer(encode(asked))).body

    return send


@pytest.mark.parametrize("end", ["abandon", "deliver"])
def test_a_run_that_has_ended_is_not_begun_again(end, tmp_path):
    """It would be another run, at other penalties or with other sites, without another approval."""
    site = Site("s0", lambda _: patients(), Policy(approve="ask"), home=tmp_path)
    owner, carrier = Approvals(tmp_path, site.policy), FaultyTransport({"s0": site})
    with pytest.raises(FederationError, match="not decided"):
        fit({"s0": site}, spec())
    owner.decide(next(iter(owner.read()["questions"])), "approved")
    fit({"s0": site}, spec(), carrier)
    agree = next(decode(message) for _, message in carrier.messages if kind(decode(message)) == "agree")
    if end == "abandon":
        assert decode(site.answer(encode(replace(agree, body=Abandon())))).body is None
        assert not list((tmp_path / "runs").iterdir())
    for epoch in (0, 1, 2):
        reply = decode(site.answer(encode(replace(agree, epoch=epoch)))).body
        assert reply.reason == "stale" or "This run has ended at this site" in reply.sentence


def test_control_characters_of_a_coordinator_do_not_reach_the_owner(tmp_path):
    site = Site("s0", lambda _: patients(), home=tmp_path)

    def changed(messages):
        for name, message in messages.items():
            read = decode(message)
            if kind(read) == "deliver":
                told = {**read.body.convergence, "message": "done\x1b[2J"}
                read = replace(read, body=replace(read.body, convergence=told, about={"run\x07": ("\x9b2J",)}))
            yield name, encode(read)

    class Changed(InProcess):
        def exchange(self, messages, timeout):
            return super().exchange(dict(changed(messages)), timeout)

    fit({"s0": site}, spec(), Changed({"s0": site}))
    model, extra = load_model(tmp_path / "model")
    assert (model.convergence.message, extra["run?"]) == ("done?[2J", ["?2J"])


@pytest.mark.parametrize("part", ["response", "common", "text"])
@pytest.mark.parametrize("skips", [(), ("hello",)])
def test_a_formula_that_differs_from_its_text_is_refused(part, skips):
    """The owner reads the text, and the rule 'columns' looked at another part of the formula than the response."""
    frame = patients().with_columns(secret=pl.col("y"))
    carrier = FaultyTransport(sites_of({"s0": frame}))
    fit({"s0": None}, spec(formula="I(y) ~ x"), carrier)
    site = Site("s0", lambda _: frame, Policy(columns=("y", "x", "hiv"), expressions=(), transforms=()))
    for message in (decode(each) for _, each in carrier.messages):
        if kind(message) in ("hello", "agree") and kind(message) not in skips:
            problem = json.loads(json.dumps(message.body.problem))
            if part == "text":
                problem["spec"]["formula"] = "I(y) ~ hiv"
            elif part == "response":
                problem["formula"]["response"] = "secret"
            else:
                problem["formula"]["common"]["terms"].append([["hiv", "lookup"]])
            changed = replace(message, body=replace(message.body, problem=problem))
            assert "is not that of its text" in decode(site.answer(encode(changed))).body.sentence


def test_the_sum_of_all_responses_does_not_show_a_client_that_a_term_leaves_out():
    """Without an intercept, the responses of all clients less those of all but one show that one."""
    with pytest.raises(FederationError, match="rule 'share'"):
        fit({"s0": Site("s0", lambda _: patients(), Policy(minimum=5, share=0.6))}, spec(formula="y ~ 0 + well"))


def test_scales_of_a_changed_coordinator_are_refused():
    """``well - 1`` would be an indicator of one client."""
    one = Standardise(Scale(np.ones(1), np.ones(1)))
    send = joined_site(patients(), spec(formula="y ~ 0 + x"))
    assert "only with standardize=True" in send(one, SweepUp()).sentence
    send = joined_site(patients(), spec(formula="y ~ 0 + x", standardize=True))
    assert "only with standardize=True" in send(one, one, SweepUp()).sentence
    assert not isinstance(send(one, SweepUp()), Refusal)
    assert "only with standardize=True" in send(one, SweepUp(), exchange=2).sentence


@pytest.mark.parametrize("gamma", [-7.0, np.nan, -np.inf])
def test_penalties_that_would_single_out_a_client_are_refused(gamma):
    """At the penalty -n the sums of a client with n rows have a pole: they are all that one sees."""
    send = joined_site(patients(), spec(formula="y ~ 1"))
    assert "a negative number (SetGamma.gamma)" in send(SetGamma(np.full(2, gamma)), SweepUp()).sentence
    assert not isinstance(send(SetGamma(np.full(2, np.inf)), SweepUp()), Refusal)


@pytest.mark.parametrize(
    "S", [[[1.0, 0.0], [0.0, -0.1]], [[1.0, 1.1], [1.1, 1.0]], [[1e12, 0.0], [0.0, -1e-3]], [[0.0, 1.0], [1.0, 1.0]]]
)
def test_covariances_that_would_single_out_a_client_are_refused(S):
    send = joined_site(patients(), spec(formula="y ~ x"))
    order = TermOrder(np.arange(2), 2)
    good = np.array([[[[1.0, 1.0], [1.0, 1.0]]], [[[0.0, 0.0], [0.0, 1e-12]]]])
    assert "no covariance (IntegrateClients.S)" in send(IntegrateClients(np.array([[S]]), order)).sentence
    assert "no covariance" not in getattr(send(IntegrateClients(good, order)), "sentence", "")


@pytest.mark.parametrize("formula", ["y ~ x + center(v)", "y ~ x + scale(v)", "y ~ x + poly(v, 2)"])
def test_the_sums_that_functions_learn_from_are_over_enough_clients_too(formula):
    frame = patients().with_columns(v=pl.when(pl.col("client") == "c7").then(pl.col("y")).otherwise(0.0))
    carrier = FaultyTransport({"s0": Site("s0", lambda _: frame, Policy(minimum=5, share=0.6))})
    with pytest.raises(FederationError, match="rule 'minimum'"):
        fit({"s0": None}, spec(formula=formula), carrier)
    assert not [reply for _, reply in carrier.replies if isinstance(decode(reply).body, tuple)]
    fine = formula.replace("x + ", "").replace("(v", "(x")
    fit({"s0": Site("s0", lambda _: frame, Policy(minimum=5, share=0.6))}, spec(formula=fine))


@pytest.mark.parametrize("setting", ["offset", "weights"])
def test_offset_and_weights_that_differ_for_one_client_are_refused(setting):
    """A second run without them would show this client by difference."""
    frame = patients().with_columns(v=1.0 + pl.col("hiv"))
    with pytest.raises(FederationError, match="rule 'share'"):
        fit({"s0": Site("s0", lambda _: frame, Policy(minimum=5, share=0.6))}, spec(formula="y ~ x", **{setting: "v"}))


def test_a_column_with_one_value_for_all_but_a_few_clients_does_not_show_these_few():
    """Four clients are not in ``most``: the constant less ``most`` is a sum over them, whatever ``share`` allows."""
    few = pl.col("client").is_in(["c3", "c5", "c7", "c9"])  # of cluster b
    frame = patients().with_columns(most=(~few).cast(pl.Int64), shifted=3.0 - 2.0 * few.cast(pl.Int64))
    assert sums_of(frame, minimum=4, formula="y ~ x + most") == []
    for column in ("most", "shifted"):
        (weak,) = sums_of(frame, minimum=5, formula=f"y ~ x + {column}")
        assert (weak.cell, weak.term, weak.clients) == ("b", column, 4)


@pytest.mark.parametrize("asked", [{"formula": "y ~ x + v", "standardize": True}, {"formula": "y ~ x + scale(v)"}])
def test_weights_of_zero_do_not_hide_whose_rows_are_in_sums_without_weights(asked):
    """Means of terms and the sums that functions learn from have no weights: with a weight of zero ``v`` showed one client."""
    frame = patients().with_columns(v=pl.when(pl.col("client") == "c7").then(pl.col("y")).otherwise(0.0))
    carrier = FaultyTransport({"s0": Site("s0", lambda _: frame, Policy(minimum=5, share=0.6))})
    with pytest.raises(FederationError, match="rule 'minimum'"):
        fit({"s0": None}, spec(weights="well", **asked), carrier)
    assert not [reply for _, reply in carrier.replies if isinstance(decode(reply).body, tuple)]
    fine = {name: value.replace("v", "z") if value == "y ~ x + v" else value for name, value in asked.items()}
    fine |= {"formula": fine["formula"].replace("scale(v)", "scale(x)").replace("x + scale", "scale")}
    fit({"s0": Site("s0", lambda _: frame, Policy(minimum=5, share=0.6))}, spec(weights="weight", **fine))


def test_a_response_that_one_client_dominates_does_not_leave_in_a_sum_without_weights():
    frame = patients().with_columns(y=pl.col("y") + 1e6 * pl.col("hiv"))
    with pytest.raises(FederationError, match="rule 'minimum'"):
        fit({"s0": Site("s0", lambda _: frame, Policy(minimum=5, share=0.6))}, spec(formula="y ~ x", weights="well"))


def test_a_node_keeps_the_rows_of_runs_that_go_on_only():
    sites = sites_of(by_turns(table(1), 2))
    first, second = (fit(sites, spec(gamma=gamma)) for gamma in (2.0, 3.0))
    for site in sites.values():
        with pytest.raises(KeyError):
            site.node(first.run)
        assert site.node(second.run).data.n_rows


def test_a_message_with_a_giant_header_is_refused_before_it_is_decoded():
    """A header takes many times its size in memory."""
    site = Site("s0", lambda _: patients(), Policy())
    answers = [decode(site.answer(encode(Envelope("r1", 0, 0, "x" * size)))) for size in (10, 1 << 25)]
    assert all(isinstance(answer.body, Refusal) for answer in answers)
    assert [answer.run for answer in answers] == ["r1", ""]  # of the second not even the name of its run was read


# Policy: messages and replies


def test_every_message_of_the_fit_belongs_to_a_solver_that_a_site_can_refuse():
    kinds = {kind_.__name__: solver_of(kind_) for kind_ in _all_messages() if kind_.__module__.startswith("covey.")}
    assert {kinds[name] for name in ("SweepUp", "SweepDown", "CurvatureAtFit")} == {"sweep"}
    assert kinds["NewtonStep"] == "newton"
    assert kinds["IntegrateClients"] == kinds["StepToMode"] == "learn"
    assert kinds["L2gdMove"] == kinds["DrawVector"] == "gradient"
    free = {name for name, solver in kinds.items() if solver is None}
    own = {"Hello", "AskReady", "DrawSalt", "Agree", "Deliver", "Abandon", "SiteMessage"}
    assert free == own | {"Batch", "Standardise", "SetGamma", "ReleaseSums", "PlaceClients"}


def _all_messages(base=Message):
    return {base} - {Message} | {each for kind_ in base.__subclasses__() for each in _all_messages(kind_)}


def test_messages_of_other_solvers_are_refused_whatever_the_problem_says():
    """A dishonest coordinator agrees on a sweep and asks for something else."""
    sites = sites_of(by_turns(table(1), 2), solvers=("sweep",))
    fit(sites, spec())
    with pytest.raises(FederationError, match=r"'newton begin'.*rule 'solvers'"):
        fit(sites, spec(solver="newton"))


def test_a_site_that_sends_vectors_only_refuses_matrices():
    parts = by_turns(table(1), 2)
    with pytest.raises(FederationError, match="rule 'replies'"):
        fit(sites_of(parts, replies="vectors"), spec(solver="sweep"))


@pytest.mark.parametrize("family", ["gaussian", "bernoulli"])
def test_auto_takes_vectors_if_one_site_sends_nothing_else(family):
    """The other sites would send matrices. For what apgd cannot do, the site's refusal names its rule."""
    parts = by_turns(table(1, family), 3)
    sites = sites_of(parts) | {"s1": sites_of(parts, replies="vectors", solvers=("gradient",))["s1"]}
    outcome = fit(sites, spec(family))
    assert outcome.model.convergence.solver == "apgd"
    np.testing.assert_allclose(outcome.model.w, in_memory(table(1, family), spec(family)).w, atol=1e-3)
    assert fit(sites_of(parts), spec(family)).model.convergence.solver != "apgd"
    with pytest.raises(FederationError, match="rule 'solvers'"):
        fit(sites, spec(james_stein=True))


def test_limits_on_runs_and_messages():
    sites = sites_of(by_turns(table(1), 2), runs=2)
    fit(sites, spec())
    fit(sites, spec(formula="y ~ x"))
    with pytest.raises(FederationError, match=r"2 runs.*rule 'runs'"):
        fit(sites, spec())
    with pytest.raises(FederationError, match="rule 'messages'"):
        fit(sites_of(by_turns(table(1), 2), messages=2), spec())


def test_without_a_file_everything_is_refused(tmp_path):
    """And each refusal names its rule, until the owner has changed them one by one."""
    table(1).write_parquet(tmp_path / "t.parquet")
    rules, seen = {}, []
    answers = {
        "client": "client", "columns": ["y", "x", "z"], "groups": ["cluster"], "families": ["gaussian"], "secure": False,
        "solvers": ["sweep"], "replies": "all", "minimum": 1, "share": 1.0, "approve": "policy", "operators": ["any"],
    }  # fmt: skip
    while len(seen) < 15:
        (tmp_path / "site.toml").write_text("\n".join(f"{name} = {json.dumps(value)}" for name, value in rules.items()))
        site = SiteFile.read(tmp_path, table=tmp_path / "t.parquet", site="s0", insecure=True).open()
        try:
            fit({"s0": site}, spec(solver="sweep"))
            break
        except FederationError as problem:
            text = str(problem)
            found = [name for name in answers if f"rule {name!r} in site.toml" in text] or ["approve"] * ("owner" in text)
            assert found, text
            seen.append(found[0])
            rules[found[0]] = answers[found[0]]
            (tmp_path / "questions.json").unlink(missing_ok=True)
    assert set(seen) == set(answers)


# Approval and audit


def test_a_run_waits_for_its_owner_and_no_row_is_read_before(tmp_path):
    frame, read = table(1), []

    def reads(_):
        read.append(1)
        return frame

    site = Site("s0", reads, Policy(approve="ask"), home=tmp_path)
    approvals = Approvals(tmp_path, site.policy)
    with pytest.raises(FederationError, match="owner has not decided yet; at the site: covey site approve"):
        fit({"s0": site}, spec())
    assert not read
    ((name, asked),) = approvals.read()["questions"].items()
    assert asked["decision"] == "waiting"
    assert asked["spec"]["formula"] == "y ~ x + z"
    approvals.decide(name, "approved")
    fit({"s0": site}, spec())
    with pytest.raises(FederationError, match="not decided"):  # an approval is good for one run
        fit({"s0": site}, spec())
    approvals.decide(name, "refused")
    with pytest.raises(FederationError, match="has refused"):
        fit({"s0": site}, spec())
    with pytest.raises(FederationError, match="not decided"):  # nor is it good for another question
        fit({"s0": site}, spec(formula="y ~ x"))
    with pytest.raises(FederationError, match="no question 'nothing'"):
        approvals.decide("nothing", "approved")


def test_a_coordinator_waits_while_an_owner_decides(tmp_path):
    site = Site("s0", lambda _: table(1), Policy(approve="ask"), home=tmp_path)
    approvals, asked = Approvals(tmp_path, site.policy), []

    class Owner(InProcess):
        def exchange(self, messages, timeout):
            came = super().exchange(messages, timeout)
            asked.append(1)
            for name, question in approvals.read()["questions"].items():
                if question["decision"] == "waiting":
                    approvals.decide(name, "approved")
            return came

    fit({"s0": site}, spec(), Owner({"s0": site}), RunSettings(retries=0, timeout=1.0, patience=30.0))
    assert len(asked) == 6  # the hello twice


def test_an_approved_problem_cannot_be_exchanged_for_another(tmp_path):
    """A dishonest coordinator: it asks for approval of one formula and lets the site join another."""
    sites = {name: Site(name, lambda _, part=part: part, Policy(approve="ask"), home=tmp_path / name)
             for name, part in by_turns(table(1), 2).items()}  # fmt: skip
    for asked in (spec(formula="y ~ x"), spec()):
        with pytest.raises(FederationError, match="not decided"):
            fit(sites, asked)
        for name, site in sites.items():
            approvals = Approvals(tmp_path / name, site.policy)
            for question, found in approvals.read()["questions"].items():
                if found["spec"]["formula"] == "y ~ x":
                    approvals.decide(question, "approved")
    real = resolve(spec()).to_json()

    def cheat(site, message, reply):
        read = decode(message)
        if kind(read) != "agree":
            return reply
        problem = {**read.body.problem, "spec": real["spec"], "formula": real["formula"]}
        return sites[site].answer(encode(replace(read, epoch=read.epoch + 1, body=replace(read.body, problem=problem))))

    with pytest.raises(FederationError, match=r"another problem|design|not those of the formula"):
        fit(sites, spec(formula="y ~ x"), FaultyTransport(sites, cheat))


def test_the_audit_log_is_a_chain(tmp_path):
    site = Site("s0", lambda _: table(1), home=tmp_path)
    fit({"s0": site}, spec())
    AuditLog(tmp_path).add("approved", question="q")  # another process
    site.answer(b"nonsense")
    lines = site.audit.lines()
    assert [json.loads(line).get("kind", "") for line in lines] == [
        "hello", "agree", "penalties, sweep up", "sweep down", "deliver", "", "unreadable"
    ]  # fmt: skip
    assert json.loads(lines[2])["cells"] == 3
    assert json.loads(lines[-1])["refused"] == "data"
    assert '"c7"' not in (tmp_path / "audit.jsonl").read_text()
    assert AuditLog(tmp_path).verify()[0] == len(lines)
    for at, change in (
        (2, lambda line: line.replace('"out"', '"put"')),
        (3, lambda _: ""),
        (1, lambda line: f"{line}\n{line}"),
    ):
        broken = [change(line) if k == at else line for k, line in enumerate(lines)]
        (tmp_path / "audit.jsonl").write_text("".join(f"{line}\n" for line in broken if line))
        with pytest.raises(FederationError, match="does not follow"):
            AuditLog(tmp_path).verify()


# Masks that an invented site cannot break


def keys_of(*names):
    ec = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ec")
    return {name: ec.generate_private_key(ec.SECP384R1()) for name in names}


def masked_sites(keys, known=None, **settings):
    """Sites that know each other by key."""
    public = {name: (bare(public_text(key)),) for name, key in keys.items()} if known is None else known
    parts = by_turns(table(5, clients=24), 3)
    policy = Policy(secure=True, **settings)
    return {
        name: Site(name, lambda _, part=part: part, policy, identity=keys[name],
                   peers={other: each for other, each in public.items() if other != name})
        for name, part in parts.items()
    }  # fmt: skip


def test_sites_that_know_each_other_fit_under_masks():
    sites = masked_sites(keys_of("s0", "s1", "s2"))
    assert fit(sites, spec(), settings=SECURE).roster == ("s0", "s1", "s2")


def test_an_invented_site_is_refused():
    """The operator adds a site of its own, whose masks it knows, or puts its own key in the place of a site's key."""
    keys = keys_of("s0", "s1", "s2")
    public = {name: (bare(public_text(key)),) for name, key in keys.items()}
    unknown = masked_sites(keys, {name: public[name] for name in ("s0", "s1")})
    with pytest.raises(FederationError, match=r"does not know site 's2'.*rule 'peers'"):
        fit(unknown, spec(), settings=SECURE)
    for pinned, enough in ((1, True), (2, False)):  # or one known site suffices
        sites = masked_sites(keys, {name: public[name] for name in ("s0", "s1")}, pinned=pinned)
        if enough:
            fit(sites, spec(), settings=SECURE)
        else:
            with pytest.raises(FederationError, match="rule 'peers'"):
                fit(sites, spec(), settings=SECURE)
    forged = masked_sites(keys)
    forged["s2"].identity = keys_of("x")["x"]
    with pytest.raises(FederationError, match="does not know"):
        fit(forged, spec(), settings=SECURE)


def test_keys_are_replaced_and_revoked():
    keys, new = keys_of("s0", "s1", "s2"), keys_of("s2")["s2"]
    public = {name: (bare(public_text(key)),) for name, key in keys.items()}
    both = {**public, "s2": (*public["s2"], bare(public_text(new)))}
    fit(masked_sites({**keys, "s2": new}, both), spec(), settings=SECURE)
    fit(masked_sites(keys, both), spec(), settings=SECURE)
    only_new = {**public, "s2": (bare(public_text(new)),)}
    with pytest.raises(FederationError, match="Site 's2' signed its mask key with a key that this site does not know"):
        fit(masked_sites(keys, only_new), spec(), settings=SECURE)


def test_a_signature_is_of_one_run_one_site_and_one_key():
    key = keys_of("s0")["s0"]
    public, signature = public_text(key), sign(key, b"run", b"s0", b"key")
    assert verified(f"{public} comment", signature, b"run", b"s0", b"key")
    for parts in ((b"run2", b"s0", b"key"), (b"run", b"s1", b"key"), (b"run", b"s0", b"kez"), (b"runs0", b"", b"key")):
        assert not verified(public, signature, *parts)
    assert not verified("not a key", signature, b"run", b"s0", b"key")
    assert not verified(public, "zz", b"run", b"s0", b"key")


def test_a_site_answers_known_operators_only():
    key = public_text(keys_of("op")["op"])
    site = Site("s0", lambda _: table(1), Policy(operators=(key,)))
    with pytest.raises(FederationError, match=r"does not know the operator.*rule 'operators'"):
        fit({"s0": site}, spec())

    class Signed(InProcess):
        def exchange(self, messages, timeout):
            return {name: site.answer(message, key) for name, message in messages.items()}

    fit({"s0": site}, spec(), Signed({"s0": site}))
    with pytest.raises(FederationError, match="rule 'operators'"):  # nobody is on an empty list
        fit({"s0": Site("s0", lambda _: table(1), Policy(operators=()))}, spec())
    fit({"s0": Site("s0", lambda _: table(1), Policy(operators=("any",)))}, spec())


# A hostile site


def test_what_a_site_says_cannot_change_a_terminal():
    class Rude(Site):
        def answer(self, message, operator=""):
            return encode(replace(decode(message), body=Refusal("data", "no\x1b[2J\x07 rows")))

    with pytest.raises(FederationError) as refused:
        fit({"s0": Rude("s0", lambda _: None)}, spec())
    assert "no?[2J? rows" in str(refused.value)


def test_a_number_of_clients_without_tags_is_refused_before_memory_is_taken():
    sites = sites_of(by_turns(table(1), 2))

    def claim(site, message, reply):
        read = decode(reply)
        if kind(decode(message)) != "agree" or site != "s1":
            return reply
        hashes, totals = read.body
        return encode(replace(read, body=(hashes, replace(totals, clients=totals.clients + 10**12))))

    with pytest.raises(FederationError, match=r"'s1'.*more than the limit"):
        fit(sites, spec(), FaultyTransport(sites, claim))


# Dry run


def test_a_dry_run_says_who_would_take_part(tmp_path):
    frame = patients()
    sites = {
        "easy": Site("easy", lambda _: frame),
        "strict": Site("strict", lambda _: frame, Policy(minimum=5, share=0.6), home=tmp_path / "strict"),
        "slow": Site("slow", lambda _: frame, Policy(approve="ask"), home=tmp_path / "slow"),
        "shut": Site("shut", lambda _: frame, Policy(columns=("y",))),
    }
    asked = resolve(spec(formula="y ~ x + hiv"))
    lines = dry_run(InProcess(sites), [*sites, "away"], asked, RunSettings()).splitlines()
    said = dict(line.split(": ", 1) for line in lines)
    assert said["easy"] == "it would take part"
    assert said["slow"] == "its owner would be asked"
    assert "sums over too few" in said["strict"]
    assert "hiv" not in said["strict"]
    assert "rule 'columns'" in said["shut"]
    assert "not connected" in said["away"]
    assert not (tmp_path / "slow" / "questions.json").exists()
