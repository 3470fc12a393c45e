"""What a site never sends, and what it answers to a coordinator that does not follow the protocol."""

import subprocess
import sys
from dataclasses import dataclass, replace

import numpy as np
import polars as pl
import pytest

from covey import __version__
from covey.errors import CoveyError, FederationError
from covey.federation.operator.operate import run_fit
from covey.federation.operator.settings import Members, RunSettings
from covey.federation.site.file import SiteFile
from covey.federation.site.policy import Policy
from covey.federation.site.site import Site
from covey.federation.site.table import check_shared, profile_of
from covey.federation.wire.codec import Envelope
from covey.federation.wire.messages import DrawSalt, Hello
from covey.federation.wire.transport import InProcess
from covey.nodes.network import Batch, Snapshot
from covey.problem.problem import Spec, resolve
from covey.records import Record, RecordError, decode, encode
from covey.solvers.direct.sweep import SweepUp
from covey.tables.design import Formula
from covey.tables.formula import Terms
from tests.federation.sites import (
    FaultyTransport,
    assert_same,
    by_turns,
    fit,
    in_memory,
    kind,
    sites_of,
    spec,
    split_by,
    table,
    thetas,
)

FRAME = table(41, clients=24)
LEARNS = {"gamma": None, "lam": None}


def greeted(asked, **settings):
    """What one site answers to a hello."""
    (site,) = sites_of({"s": FRAME}, **{"minimum": 3, **settings}).values()
    hello = Hello(__version__, resolve(asked).to_json())
    return decode(site.answer(encode(Envelope("run", 0, 0, hello))))


@pytest.mark.parametrize(
    "asked",
    [
        spec("bernoulli", formula="x ~ z"),
        spec("bernoulli", formula="client ~ x"),
        spec(formula="y ~ C(x)"),
        spec(formula="y ~ client"),
        spec(cluster="client"),
    ],
)
def test_values_that_few_clients_have_are_not_sent(asked):
    reply = encode(greeted(asked))
    assert kind(decode(reply)) == "refusal"
    assert b"c17" not in reply
    assert str(FRAME["x"][5]).encode() not in reply


def test_the_minimum_of_categories_holds_without_a_hello():
    """A dishonest coordinator: it asks for a category of one client in the agreement only."""
    rare = FRAME.with_columns(z=pl.when(pl.col("client") == "c0").then(pl.lit("rare")).otherwise(pl.col("z")))
    sites = sites_of({"s": rare})
    carrier = FaultyTransport(sites)
    fit(sites, spec(), carrier)
    agree = next(message for _, message in carrier.messages if kind(decode(message)) == "agree")
    reply = decode(sites_of({"s": rare}, minimum=2)["s"].answer(agree))
    assert "Column 'z' has a value that fewer than 2 clients here have" in reply.body.sentence


def test_the_minimum_of_categories_counts_clients_whose_ids_are_nested_in_clusters():
    """Client 1 of cluster a and client 1 of cluster b are two clients that have a category."""
    frame = pl.DataFrame({"client": [1, 2] * 6, "cluster": list("aabbcc") * 2, "z": ["u", "v"] * 6, "y": [0, 1] * 6})
    shared = Spec(formula="y ~ z", client="client", cluster="cluster", nested=True)
    check_shared(frame, shared, ["z"], 3)
    with pytest.raises(FederationError, match="fewer than 2 clients"):
        check_shared(frame, replace(shared, nested=False), ["z"], 2)
    draft = resolve(replace(shared, family="bernoulli"))
    assert profile_of(frame, draft, minimum=2).classes == (0, 1)


def test_a_site_answers_about_its_own_columns_and_clients_only():
    own = {
        "client": "client",
        "columns": ["y", "x", "z"],
        "groups": ["cluster"],
        "families": ["gaussian"],
        "solvers": ["sweep"],
    }
    own |= {"transforms": ["log"], "expressions": ["I(x**2)"]}
    for asked in (spec(), spec(formula="y ~ log(x) + I(x ** 2)"), spec(cluster=None)):
        assert kind(greeted(asked, **own)) == "reply"
    for asked, column, rule in (
        (spec(weights="weight"), "'weight'", "columns"),
        (spec(offset="weight"), "'weight'", "columns"),
        (spec(formula="y ~ x:weight"), "'weight'", "columns"),
        (spec(formula="y ~ log(weight)"), "'weight'", "columns"),
        (spec(formula="y ~ exp(x)"), "'exp(x)'", "transforms"),
        (spec(formula="y ~ log(x + z)"), "'log(x + z)'", "expressions"),
        (spec(formula="y ~ I(x**3)"), "I(x", "expressions"),
        (spec(formula="y ~ bs(x, knots=(0.1, 0.2), lower_bound=-9, upper_bound=9)"), "'bs(x", "expressions"),
        (spec(formula="y ~ x + offset(weight)"), "'weight'", "columns"),
        (spec(formula="log(weight) ~ x"), "'weight'", "columns"),
        (spec(cluster="z"), "'z'", "groups"),
        (spec("poisson"), "'poisson'", "families"),
        (spec(gamma=None, lam=None), "'learn'", "solvers"),
        (spec(client="cluster", cluster=None), "'cluster'", "client"),
    ):
        sentence = greeted(asked, **own).body.sentence
        assert column in sentence
        assert f"rule {rule!r} in site.toml" in sentence
    assert "under masks only" in greeted(spec(), secure=True).body.sentence


@pytest.mark.parametrize(
    ("with_formula", "sentence"),
    [(False, "'x . I.weight..2.' of a design are not those of the formula, 'x'"), (True, "is not that of its text 'y ~ x'")],
)
def test_a_design_of_other_columns_than_the_formula_is_refused(with_formula, sentence):
    """A dishonest coordinator: the formula has allowed columns, the design reads others."""
    terms = Terms.parse("x + I(weight**2)")
    design = Formula.of(terms, ["x", "weight"], {}).to_json()
    own = {"client": "client", "columns": ["y", "x", "cluster"]}
    sites = sites_of(by_turns(FRAME, 3), **own)

    def cheat(site, message, reply):
        read = decode(message)
        if kind(read) != "agree":
            return reply
        problem = {**read.body.problem, "design": design}
        if with_formula:
            problem["formula"] = {**problem["formula"], "common": terms.to_json()}
        return sites[site].answer(encode(replace(read, epoch=read.epoch + 1, body=replace(read.body, problem=problem))))

    asked = spec(formula="y ~ x")
    assert fit(sites_of(by_turns(FRAME, 3), **own), asked).model.terms == ("Intercept", "x")
    with pytest.raises(FederationError, match=sentence):
        fit(sites, asked, FaultyTransport(sites, cheat))


def test_a_cluster_that_is_not_in_the_profile_is_refused():
    parts = by_turns(FRAME, 3)
    lacks = {**parts, "s1": parts["s1"].filter(pl.col("cluster") != "a")}
    seen = []

    class Grows(Site):
        def answer(self, message):
            self.read = lambda _: (lacks if kind(decode(message)) == "hello" else parts)[self.name]
            seen.append(kind(decode(message)))
            return super().answer(message)

    sites = {name: Grows(name, None, Policy(1)) for name in parts}
    with pytest.raises(FederationError, match="Site 's1' has clients of cluster 'a', which it did not name"):
        fit(sites, spec())
    assert "ask" not in seen


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ("minumum = 50", "unknown name 'minumum'; did you mean 'minimum'?"),
        ("epsilom = 1.0", "did you mean 'epsilon'?"),
        ("secure = 'no'", "must be true or false. Got 'no' instead"),
        ("minimum = 0", "'minimum' in site.toml must be a whole number. Got 0 instead"),
        ("minimum = 2.5", "must be a whole number. Got 2.5 instead"),
        ("columns = 'x'", "'columns' in site.toml must be a list of texts. Got 'x'"),
        ("solvers = ['sweeep']", "did you mean 'sweep'?"),
        ("approve = 'always'", "has 'always'"),
        ("epsilon = -1", "> 0. Got -1"),
        ("peers = 3", "The table [peers]"),
        ("[peers]\nnorth = 'nokey'", "peer 'north' in site.toml must be the text of a .pub file"),
        ("operators = ['alice']", "rule 'operators' in site.toml must be the text of a .pub file"),
        ("minimum = [", "is not TOML"),
    ],
)
def test_mistakes_in_a_site_file_are_refused(settings, why, tmp_path):
    (tmp_path / "site.toml").write_text(settings)
    with pytest.raises(CoveyError) as error:
        SiteFile.read(tmp_path)
    assert why in str(error.value)


def test_a_home_is_private_and_its_model_folder_is_checked_before_the_fit(tmp_path):
    home = tmp_path / "home"
    home.mkdir(mode=0o755)
    assert kind(greeted(spec(), home=home)) == "reply"
    assert home.stat().st_mode & 0o077 == 0
    (home / "model").mkdir()
    (home / "model" / "notes.txt").write_text("mine")
    assert "holds other things" in greeted(spec(), home=home).body.sentence


def test_a_fault_of_the_program_is_in_the_sites_own_log(capsys):
    def broken(_):
        raise ZeroDivisionError("a value of a row")

    site = Site("s", broken)
    reply = decode(site.answer(encode(Envelope("run", 0, 0, Hello(__version__, resolve(spec()).to_json())))))
    assert (reply.body.reason, "a value" in reply.body.sentence) == ("broken", False)
    assert "ZeroDivisionError: a value of a row" in capsys.readouterr().err


def test_a_run_with_masks_does_not_continue_without_them():
    """A dishonest coordinator: an agreement without keys, or with the keys of some sites only."""
    for change in ({"keys": {}}, {"keys": None}):
        sites = sites_of(by_turns(FRAME, 3))

        def cheat(site, message, reply, change=change, sites=sites):
            read = decode(message)
            if kind(read) != "agree":
                return reply
            keys = {} if change["keys"] == {} else dict(list(read.body.keys.items())[:2])
            fresh = replace(read, epoch=read.epoch + 1, body=replace(read.body, keys=keys))
            return sites[site].answer(encode(fresh))

        with pytest.raises(CoveyError, match=r"masks|keys"):
            fit(sites, spec(), FaultyTransport(sites, cheat), RunSettings(secure=True, retries=0))


class Changed(InProcess):
    """A dishonest coordinator: ``change`` returns another body for a message of one kind to one site."""

    def __init__(self, sites, site, of, change):
        super().__init__(sites)
        self.changed, self.of, self.change, self.replies = site, of, change, {}

    def exchange(self, messages, timeout):
        for site, message in messages.items():
            read = decode(message)
            if site == self.changed and kind(read) == self.of:
                messages = {**messages, site: encode(replace(read, body=self.change(read.body)))}
        replies = super().exchange(messages, timeout)
        self.replies |= {(site, kind(decode(messages[site]))): decode(reply) for site, reply in replies.items()}
        return replies


def test_a_third_site_does_not_send_its_sums_if_two_sites_have_the_same_key():
    sites = sites_of(by_turns(FRAME, 3))

    def same(body):
        return replace(body, keys={**body.keys, "s2": body.keys["s0"].upper()})

    carrier = Changed(sites, "s1", "agree", same)
    with pytest.raises(FederationError, match=r"Site 's1': Sites 's0' and 's2' have the same public key.*--home"):
        fit(sites, spec(), carrier, RunSettings(secure=True, retries=0))
    assert kind(carrier.replies["s1", "agree"]) == "refusal"


def test_client_ids_are_not_hashed_without_a_key_in_a_masked_run():
    sites = sites_of(by_turns(FRAME, 3))
    carrier = Changed(sites, "s1", "agree", lambda body: replace(body, salt=""))
    with pytest.raises(FederationError, match=r"Site 's1': .*no key for the hashes of clients arrived; start a new run"):
        fit(sites, spec(), carrier, RunSettings(secure=True, retries=0))


def test_a_site_without_a_key_draws_no_salt():
    (site,) = sites_of({"s": FRAME}).values()
    reply = decode(site.answer(encode(Envelope("run", 0, 0, DrawSalt({"other": "00" * 32})))))
    assert (reply.body.reason, reply.body.sentence) == ("data", "This site has no key for this run; start a new run.")


@pytest.mark.parametrize("problem", [{}, {"spec": 3}, {**resolve(spec()).to_json(), "formula": {"common": 1}}])
def test_a_problem_that_cannot_be_read_is_refused_for_good(problem):
    (site,) = sites_of({"s": FRAME}).values()
    reply = decode(site.answer(encode(Envelope("run", 0, 0, Hello(__version__, problem)))))
    assert reply.body.reason == "data"  # the coordinator does not ask again
    assert "problem in this message cannot be read; install the same version of covey" in reply.body.sentence


def test_a_site_that_sends_no_tags_of_pairs_is_refused_if_the_operator_lists_clients(tmp_path):
    parts = by_turns(FRAME, 3)
    listed = [part.select(pl.lit(name).alias("site"), "cluster", "client").unique() for name, part in parts.items()]
    pl.concat(listed).write_parquet(tmp_path / "members.parquet")
    sites, terms = sites_of(parts), RunSettings(members=Members.read(tmp_path / "members.parquet"))

    def without(site, message, reply):
        read = decode(reply)
        if site != "s1" or kind(decode(message)) != "agree":
            return reply
        return encode(replace(read, body=(replace(read.body[0], pairs=None), read.body[1])))

    fit(sites_of(parts), spec(), settings=terms)
    with pytest.raises(FederationError, match=r"Site 's1' sent no keyed hashes of its clients.*same version of covey"):
        fit(sites, spec(), FaultyTransport(sites, without), terms)


def test_a_cluster_that_one_site_has_alone_cannot_be_masked():
    parts = {name: part for (name,), part in FRAME.group_by(["cluster"])}
    with pytest.raises(FederationError, match=r"3 of 3 clusters are at one site only, such as .* at "):
        fit(sites_of(parts), spec(), settings=RunSettings(secure=True))


def test_only_records_are_built():
    for name in ("Node", "InMemory", "GroupedData", "covey.nodes.network.Batch"):
        with pytest.raises(RecordError, match=f"'{name}'"):
            decode(encode_as(name))
    with pytest.raises(RecordError):
        decode(encode_as("Envelope", []))


@dataclass(frozen=True)
class Lookalike(Record):
    """A record, and with a method ``at``, but not a message."""

    def at(self, node):
        raise AssertionError


@pytest.mark.parametrize(
    "body",
    [
        Lookalike(),
        Batch((Lookalike(),)),
        Batch((SweepUp(), Lookalike())),
        Batch((Batch((SweepUp(),)),)),
        Batch((Hello(__version__, {}), SweepUp())),
        Snapshot(np.ones(1), None, ()),
        None,
        "SweepUp",
    ],
    ids=repr,
)
def test_a_site_answers_messages_and_nothing_else(body):
    """Only messages reach the node; messages to the site itself are not accepted inside a batch."""
    sites = sites_of(by_turns(FRAME, 3))
    carrier = FaultyTransport(sites)
    fit(sites, spec(), carrier)
    agree = next(message for site, message in carrier.messages if site == "s0" and kind(decode(message)) == "agree")
    fresh = sites_of(by_turns(FRAME, 3))["s0"]
    fresh.answer(agree)
    answer = decode(fresh.answer(encode(replace(decode(agree), exchange=1, after=0, body=body))))
    assert kind(answer) == "refusal"
    assert answer.body.reason == "data"
    assert "not a message" in answer.body.sentence


def test_a_site_knows_every_message_of_the_tree():
    """A node process imports only the site module; this registers the messages of all solvers."""
    code = """
import covey.federation.site.site
from covey.records import Record
before = set(Record.registered)
import importlib, pkgutil, covey
for module in pkgutil.walk_packages(covey.__path__, "covey."):
    if not module.name.startswith(("covey.federation.flower", "covey.__main__")):
        importlib.import_module(module.name)
from covey.nodes.network import Message
print(sorted(name for name, each in Record.registered.items() if issubclass(each, Message) and name not in before))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr


def encode_as(name, has=None):
    import json

    head = json.dumps({"tree": {"is": name, "has": {} if has is None else has}, "arrays": []}).encode()
    return b"covey\x02" + len(head).to_bytes(4, "little") + head


@pytest.mark.parametrize("scale", [1e-14, 1e-7, 1e7, 1e12])
def test_masks_keep_the_digits_of_sums_of_any_size(scale):
    frame = FRAME.with_columns(x=pl.col("x") * scale, y=pl.col("y") / scale)

    def masked_and_plain(**penalties):
        asked = spec(formula="y ~ x", **penalties)
        return (fit(sites_of(by_turns(frame, 3)), asked, settings=RunSettings(secure=secure)).model for secure in (True, False))

    masked, plain = masked_and_plain(gamma=2.0, lam=1.0)
    np.testing.assert_allclose(masked.w, plain.w, rtol=1e-13)
    # A search ends anywhere close to the likelihood's top; coefficients there differ by the root of what it leaves.
    masked, plain = masked_and_plain(gamma=None, lam=None, tests=False)
    assert abs(masked.learned.components.log_likelihood - plain.learned.components.log_likelihood) < 1e-8
    np.testing.assert_allclose(masked.w, plain.w, rtol=1e-7)


@pytest.mark.parametrize(
    "more", [{"gamma": {"a": 1.0, "b": 2.0, "c": 3.0}}, {"gamma": None, "lam": None, "vary": ["Intercept"]}]
)
def test_a_run_of_any_specification_is_resumed(more, tmp_path):
    asked, sites, left = spec(**more), sites_of(by_turns(FRAME, 3)), [5]

    class Dies(InProcess):
        def exchange(self, messages, timeout):
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
            return super().exchange(messages, timeout)

    with pytest.raises(KeyboardInterrupt):
        fit(sites, asked, Dies(sites), journal=tmp_path / "journal")
    assert (tmp_path / "journal").stat().st_mode & 0o077 == 0
    again = fit(sites, asked, journal=tmp_path / "journal")
    np.testing.assert_array_equal(again.model.w, fit(sites_of(by_turns(FRAME, 3)), asked).model.w)


def test_a_run_whose_model_cannot_be_written_can_be_resumed(tmp_path, monkeypatch):
    sites, places = sites_of(by_turns(FRAME, 3)), {"journal": tmp_path / "journal", "out": tmp_path / "model"}

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("covey.federation.operator.operate.save_model", full)
        with pytest.raises(FederationError, match=r"No space.*are kept in.*run the same command again"):
            run_fit(InProcess(sites), list(sites), resolve(spec()), RunSettings(), **places)
    carrier = FaultyTransport(sites)
    run_fit(carrier, list(sites), resolve(spec()), RunSettings(), **places)
    assert {kind(decode(message)) for _, message in carrier.messages} == {"deliver"}
    assert (tmp_path / "model" / "model.json").exists()
    assert not (tmp_path / "journal").exists()


def test_the_operators_list_with_dates_and_with_ids_nested_in_clusters(tmp_path):
    from datetime import date

    days = FRAME.with_columns(cluster=pl.col("cluster").replace_strict({c: date(2020, 1, 1 + i) for i, c in enumerate("abc")}))
    nested = FRAME.with_columns(client=pl.col("client").str.slice(1).cast(pl.Int64) // 3)
    bars = replace(spec(), formula="y ~ x + (1 | cluster/client)", client=None, cluster=None, gamma=None, lam=None, tests=False)
    for frame, asked in ((days, spec()), (nested, bars)):
        parts = {str(name): part for (name,), part in frame.group_by(["cluster"])}
        listed = [part.select(pl.lit(name).alias("site"), "cluster", "client").unique() for name, part in parts.items()]
        pl.concat(listed).write_parquet(tmp_path / "members.parquet")
        terms = RunSettings(members=Members.read(tmp_path / "members.parquet"))
        assert fit(sites_of(parts), asked, settings=terms).roster == tuple(sorted(parts))
        with pytest.raises(FederationError, match="cannot check clients' ids"):
            fit(sites_of(parts), asked, settings=replace(terms, secure=True))


def test_client_ids_within_clusters_stay_as_they_are():
    """With cluster/client in the formula a client is a pair of ids, and its own id is not changed, as in memory."""
    asked = replace(
        spec(), formula="y ~ x + (1 | cluster/client)", client=None, cluster=None, gamma=None, lam=None, tests=False
    )
    sites = sites_of(by_turns(FRAME, 3))
    outcome, model = fit(sites, asked), in_memory(FRAME, asked)
    assert_same(outcome, sites, model, atol=1e-7)
    assert set(thetas(sites, outcome.run)) == set(FRAME.select("cluster", "client").rows())


def test_a_lost_site_under_masks_lets_the_run_be_resumed(tmp_path):
    from covey.federation.wire.transport import Failure

    sites = sites_of(by_turns(FRAME, 4))

    def away(site, message, reply):
        return Failure("not there") if site == "s1" and decode(message).exchange >= 2 else reply

    settings = {"journal": tmp_path / "journal", "on_loss": "continue"}
    terms = RunSettings(secure=True, retries=0)
    with pytest.raises(FederationError, match="only site 's1' drops out"):
        fit(sites, spec(), FaultyTransport(sites, away), terms, **settings)
    outcome = fit(sites, spec(), None, terms, **settings)
    assert outcome.roster == ("s0", "s1", "s2", "s3")
    assert_same(outcome, sites, in_memory(FRAME, spec()))


def test_the_order_of_pandas_categories_is_kept():
    pandas = FRAME.to_pandas()
    pandas["z"] = pandas["z"].astype("category").cat.reorder_categories(["z2", "z0", "z1"])
    from covey.federation.simulate import simulate_sites
    from tests.fits import fit_table

    run = simulate_sites(pandas, spec(), sites=2)
    assert run.outcome.model.terms == fit_table(pandas, spec()).terms
    assert run.difference(fit_table(pandas, spec())) < 1e-10


def test_missing_classes_are_reported_at_their_site():
    frame = table(42, "bernoulli").with_columns(y=pl.col("y").cast(pl.Float64))
    parts = split_by(frame, {f"c{i}": f"s{i % 2}" for i in range(12)})
    parts["s1"] = parts["s1"].with_columns(y=pl.when(pl.int_range(pl.len()) == 3).then(float("nan")).otherwise(pl.col("y")))
    with pytest.raises(FederationError, match=r"Site 's1': The response is missing .NaN. in row 3"):
        fit(sites_of(parts, share_row_errors=True), spec("bernoulli"))
