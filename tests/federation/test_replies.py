"""A coordinator survives its sites: a wrong reply ends the run with one sentence that names the site, and takes no memory."""

import time
import tracemalloc
from dataclasses import fields, replace

import numpy as np
import polars as pl
import pytest

from covey.errors import FederationError
from covey.exact import Exact
from covey.federation.operator.agreement import check_announced, check_profile, check_spread
from covey.federation.operator.exchanges import read_reply
from covey.federation.operator.settings import RunSettings
from covey.federation.wire.codec import Envelope, Placeholder, Refusal, printable
from covey.federation.wire.messages import Agree, Joined, Profile, SiteMessage, SiteTotals
from covey.federation.wire.schema import Limits, Misfit, _hints, _is_psd, _reply_type, check_message, check_record
from covey.federation.wire.transport import Failure
from covey.nodes.network import Batch, Message
from covey.problem.problem import resolve
from covey.records import Record, RecordError, Reply, decode, encode, seal
from covey.solvers.direct.elimination import Quadratic
from covey.solvers.direct.sweep import SweepDown
from covey.solvers.ledger import Ledger
from tests.federation.sites import FaultyTransport, by_turns, fit, kind, sites_of, spec, table

FRAME = table(5)
ESCAPES = "\x1b]0;owned\x07\x1b[2J\r"


def changed(when, change, site="s1"):
    """A fault: one site changes the bodies of its replies to messages of one kind."""

    def fault(name, message, reply):
        if name == site and kind(decode(message)) == when:
            found = decode(reply)
            return encode(replace(found, body=change(found.body)))
        return reply

    return fault


def stopped(when, change, asked=None, **settings):
    """The sentence with which a run ends because of such a fault; at most 100 MB are taken for it."""
    sites = sites_of(by_turns(FRAME, 3))
    carrier = FaultyTransport(sites, changed(when, change))
    tracemalloc.start()
    try:
        with pytest.raises(FederationError) as raised:
            fit(sites, asked or spec(), carrier, RunSettings(retries=0, **settings))
        assert tracemalloc.get_traced_memory()[1] < 1e8
    finally:
        tracemalloc.stop()
    text = str(raised.value)
    assert text.isprintable()
    assert "\n" not in text
    assert len(text) < 2100
    return text


def totals(**changes):
    return lambda body: (
        body[0],
        replace(body[1], **{name: change(getattr(body[1], name)) for name, change in changes.items()}),
    )


# The seven attacks


def test_a_number_of_clients_without_their_tags_takes_no_memory():
    """10^9 clients of one cluster took 30 GB."""
    text = stopped("agree", totals(clients=lambda n: n + 10**9))
    assert "'s1'" in text
    assert "more than the limit" in text
    text = stopped("agree", totals(clients=lambda n: n + 10**6 * (n > 0)))
    assert "'s1'" in text
    assert "tags of clients" in text


@pytest.mark.parametrize(
    "tags",
    ["tags", ("a", "b"), np.ones((4, 2)), np.ones((4, 3), dtype=np.uint64), np.ones(8, dtype=np.uint64), None],
    ids=["text", "texts", "floats", "wide", "flat", "none"],
)
def test_tags_that_are_not_tags(tags):
    text = stopped("agree", lambda body: (replace(body[0], tags=tags), body[1]))
    assert "'s1'" in text
    assert "Joined.tags" in text


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda body: replace(body, clusters=("a", 1, 2.5)), "ids"),
        (lambda body: replace(body, clusters=(1, 2)), "ids"),
        (lambda body: replace(body, clusters=("a", None)), "Profile.clusters"),
        (lambda body: replace(body, clusters=({"a": 1},)), "Profile.clusters"),
        (lambda body: replace(body, clusters="abc"), "Profile.clusters"),
        (lambda body: replace(body, levels={"z": 7}), "Profile.levels"),
        (lambda body: replace(body, levels={"other": ("a",)}), "columns"),
        (lambda body: replace(body, kinds={"x": "pictures", "z": "categories"}), "types of columns"),
        (lambda body: replace(body, kinds={}), "columns"),
        (lambda body: replace(body, ids={}), "types of columns"),
        (lambda body: replace(body, levels={"z": ("z0", "z0")}), "twice"),
        (lambda body: replace(body, version=7), "Profile.version"),
        (lambda body: replace(body, clusters=("a", float("nan"))), "not finite"),
        (lambda body: body.clusters, "in place of a Profile"),
        (lambda body: None, "in place of a Profile"),
    ],
)
def test_profiles_of_mixed_types(change, word):
    text = stopped("hello", change)
    assert "'s1'" in text
    assert word in text


@pytest.mark.parametrize("reason", ["data", "waiting", "broken", "stale", "behind", ESCAPES, 7])
def test_escape_sequences_of_a_site_do_not_reach_a_terminal(reason):
    text = stopped("ask", lambda body: Refusal(reason, f"look{ESCAPES}here"))
    assert "'s1'" in text
    assert ESCAPES[:4] not in text


def test_escape_sequences_in_values_are_refused():
    for change in (
        lambda body: replace(body, clusters=(f"a{ESCAPES}",)),
        lambda body: replace(body, levels={"z": (ESCAPES,)}),
        lambda body: replace(body, version=ESCAPES),
        lambda body: replace(body, ids={**body.ids, "client": ESCAPES}),
    ):
        text = stopped("hello", change)
        assert "'s1'" in text
        assert "control characters" in text
    message = encode(Envelope("run", 0, 0))
    found = read_reply(message, encode(Envelope("run", ESCAPES, ESCAPES)), Limits())
    assert isinstance(found, Failure)
    assert found.why.isprintable()
    assert read_reply(message, Failure(ESCAPES), Limits()).why.isprintable()
    assert len(printable("x" * 5000)) == 2000


def test_sums_that_are_not_positive_semi_definite():
    text = stopped("ask", lambda body: replace(body, C=-body.C) if isinstance(body, Quadratic) else body)
    assert "'s1'" in text
    assert "positive semi-definite" in text
    text = stopped("ask", lambda body: replace(body, C=body.C + np.triu(body.C, 1)) if isinstance(body, Quadratic) else body)
    assert "'s1'" in text
    assert "positive semi-definite" in text


@pytest.mark.parametrize("name", ["clients", "rows"])
def test_negative_counts(name):
    text = stopped("agree", totals(**{name: lambda n: n - 100}))
    assert "'s1'" in text
    assert f"SiteTotals.{name}" in text
    assert "negative" in text


def test_200_000_invented_clusters():
    text = stopped("hello", lambda body: replace(body, clusters=tuple(f"c{i}" for i in range(200_000))))
    assert "'s1'" in text
    assert "200,000 clusters" in text
    assert "--limits" in text


# Other replies


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda body: None, "NoneType"),
        (lambda body: replace(body, value="0"), "str"),
        (lambda body: replace(body, gradient_squared=-1.0), "negative"),
        (lambda body: replace(body, value=10**400), "int"),
        (lambda body: replace(body, force=body.force.astype(np.float64)[:, :1]), "shape"),
        (lambda body: Exact.of([1.0]), "Exact"),
        (lambda body: Joined(np.zeros((0, 2), dtype=np.uint64)), "Joined"),
    ],
)
def test_one_site_alone_cannot_send_nonsense(change, word):
    """Without another site there is nothing to compare with."""
    sites = sites_of({"s1": FRAME})
    carrier = FaultyTransport(sites, changed("ask", lambda body: change(body) if hasattr(body, "force") else body))
    with pytest.raises(FederationError, match=rf"'s1'.*{word}"):
        fit(sites, spec(), carrier, RunSettings(retries=0))


def test_masked_replies_are_checked_as_far_as_they_can_be_seen():
    def skeleton(change):
        return lambda body: (change(body[0]), body[1]) if isinstance(body, tuple) else body

    giant = skeleton(lambda tree: (Placeholder("<U400000000", (1,)), *tree[1:]))
    for change in (giant, skeleton(lambda tree: tree[:1]), lambda body: "masked", lambda body: (1, 2), lambda body: None):
        assert "'s1'" in stopped("ask", change, secure=True)
    # The sum over all sites is not positive semi-definite, and nobody can say whose part it was.
    frame, sites = table(5, "bernoulli"), sites_of(by_turns(table(5, "bernoulli"), 3))
    carrier = FaultyTransport(sites, changed("ask", lambda body: (body[0], _negative(body[1])) if body else body))
    assert len(frame)
    with pytest.raises(FederationError, match=r"do not cancel|wrong sums"):
        fit(sites, spec("bernoulli"), carrier, RunSettings(retries=0, secure=True))


def _negative(numbers: Exact) -> Exact:
    return Exact(~numbers.limbs, numbers.size)


def test_limits_can_be_changed():
    settings = RunSettings.of({"limits": '{"clusters": 2}'})
    assert settings.limits == Limits(clusters=2)
    sites = sites_of(by_turns(FRAME, 3))
    with pytest.raises(FederationError, match=r"3 clusters.*limit of 2; raise it with --limits"):
        fit(sites, spec(), settings=replace(settings, timeout=1.0, pause=0.0, retries=0))
    with pytest.raises(FederationError, match=r"\d+ bytes, more than the limit of 100"):
        fit(sites, spec(), settings=RunSettings(retries=0, limits=Limits(bytes=100)))
    for wrong in ('{"people": 2}', '{"clusters": 0}', '{"clusters": "x"}', "[", '{"clusters": 1.5}'):
        with pytest.raises(ValueError, match="limit"):
            RunSettings.of({"limits": wrong})


def test_categories_that_are_listed_twice_are_refused():
    with pytest.raises(FederationError, match="'z' have a value twice"):
        RunSettings.of({"categories": '{"z": ["a", "b", "a"]}'})


def test_100_000_clusters_take_seconds():
    n = 100_000
    names = tuple(f"c{at}" for at in range(n))
    ids = {"client": "text", "cluster": "text", "response": "numbers"}
    profile = Profile("1", {"x": "numbers", "z": "categories"}, ids, {"z": ("z0", "z1")}, names, None)
    start = time.process_time()
    check_profile(profile, resolve(spec()), Limits())
    check_spread({"a": profile, "b": profile})
    found = SiteTotals(np.ones(n, dtype=np.int64), np.ones(n, dtype=np.int64), Exact.zeros())
    check_record(found, SiteTotals, {"k": n, "d": 2})
    check_announced("a", Agree({}, names, "text", ("a",), {}, ""), profile, found)
    assert _is_psd(np.tile(np.eye(3), (n, 1, 1)))
    assert time.process_time() - start < 3.0


def test_a_run_with_many_clusters_is_not_quadratic():
    k = 4_000
    frame = pl.DataFrame({"client": np.arange(2 * k), "cluster": np.arange(2 * k) % k, "x": np.arange(2.0 * k) % 7})
    frame = frame.with_columns(y=pl.col("x") + 1.0)
    sites = sites_of({"s0": frame[:k], "s1": frame[k:]})
    start = time.process_time()
    outcome = fit(sites, spec(formula="y ~ x"))
    assert outcome.model.w.shape == (k, 2)
    assert time.process_time() - start < 10.0


# The schema itself


def test_every_message_declares_its_reply_and_every_array_its_axes():
    """A new reply without a declaration would not be checked."""
    ours = [each for each in Record.registered.values() if each.__module__.startswith("covey.")]
    messages = [each for each in ours if issubclass(each, Message) and each not in (Message, SiteMessage, Batch)]
    assert len(messages) > 30
    for each in messages:
        assert each.reply is False or _reply_type(each) is not None
    for each in ours:
        if not issubclass(each, Reply) or each in (Reply, Ledger):
            continue
        for part in fields(each):
            hint = str(_hints(each)[part.name])
            if "ndarray" in hint or "Exact" in hint:
                assert "Axes(" in hint, (each.__name__, part.name)


def test_matrices_up_to_rounding():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(50, 4, 2)) * 10.0 ** rng.integers(-6, 6, size=(50, 1, 1))
    gram = X @ np.swapaxes(X, -1, -2)  # rank 2
    assert _is_psd(gram)
    assert _is_psd(np.zeros((2, 3, 3)))
    assert _is_psd(np.zeros((2, 0, 0)))
    assert not _is_psd(gram - 1e-3 * np.abs(gram).max(axis=(-1, -2), keepdims=True) * np.eye(4))
    with pytest.raises(Misfit, match=r"Quadratic.C"):
        check_record(
            Quadratic(-np.eye(2)[None], np.zeros((1, 2)), np.zeros(1), np.zeros(1)), Quadratic, {"k": 1, "d": 2, "points": ()}
        )


# The decoder


@pytest.mark.parametrize(
    ("head", "arrays"),
    [
        ('{"tree":{"all":[{"bytes":0},{"bytes":0}]},"arrays":[["|u1",[8]]]}', 8),
        ('{"tree":{"array":0},"arrays":[["<U400000000",[1]]]}', 8),
        ('{"tree":{"array":0},"arrays":[["<f8",[-1]]]}', 8),
        ('{"tree":{"array":0},"arrays":[["<f8",[1000000000000000]]]}', 8),
        ('{"tree":{"array":0},"arrays":[["<f8",[4294967296,4294967296]]]}', 0),
        ('{"tree":{"array":0},"arrays":[["<f8",["1"]]]}', 8),
        ('{"tree":{"array":-1},"arrays":[]}', 0),
        ('{"tree":[1,2],"arrays":[]}', 0),
        ('{"tree":' + '{"all":[' * 5000 + "]}" * 5000 + ',"arrays":[]}', 0),
        ('{"tree":' + "9" * 5000 + ',"arrays":[]}', 0),
        ('{"tree":{"is":"Privacy","has":{"noise":"x","clip":1,"rounds":1}},"arrays":[]}', 0),
    ],
)
def test_bytes_that_would_take_memory_are_refused(head, arrays):
    with pytest.raises(RecordError) as raised:
        decode(seal(len(head).to_bytes(4, "little") + head.encode() + bytes(arrays)))
    assert len(str(raised.value)) < 500


def test_a_long_header_is_refused_before_it_is_read():
    text = encode(tuple(range(1000)))
    assert decode(text) == tuple(range(1000))
    with pytest.raises(RecordError, match="header"):
        decode(text, 100)


def test_a_sentence_is_short_whatever_a_site_sends():
    text = stopped("ask", lambda body: Refusal("data", "x" * 100_000))
    assert "x" * 100 in text


# Messages


@pytest.mark.parametrize("shape", [(1, 1), (3,), (2, 4), (3, 1000), (0, 0)])
def test_a_node_refuses_arrays_that_do_not_fit_its_rows(shape):
    """Compiled code does not check its indices: such a message once ended the process of a node, or read beyond an array."""
    sites = sites_of({"s1": FRAME})
    carrier = FaultyTransport(sites)
    run = fit(sites, spec(), carrier).run
    node = sites["s1"].node(run)
    check_message(SweepDown(np.zeros((3, 4))), node)
    with pytest.raises(Misfit, match=r"SweepDown\.w"):
        check_message(SweepDown(np.zeros(shape)), node)
    asked = next(decode(text) for _, text in carrier.messages if isinstance(decode(text).body, SweepDown))
    site = sites_of({"s1": FRAME})["s1"]
    for _, text in carrier.messages:
        if decode(text).exchange < asked.exchange:
            site.answer(text)
    reply = decode(site.answer(encode(replace(asked, body=SweepDown(np.zeros(shape))))))
    assert reply.body.reason == "data"
