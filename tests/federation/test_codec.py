"""Encoded messages are decoded completely or refused, and execute nothing."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from covey.exact import Exact
from covey.federation.wire.codec import Envelope, join, split
from covey.records import RecordError, decode, encode, outline, seal
from covey.solvers.direct.elimination import Quadratic
from covey.solvers.direct.newton_node import NewtonReport, NewtonStep

arrays = hnp.arrays(np.float64, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4), elements=st.floats(width=64))


def report(rng, k=3, d=2):
    seen = Quadratic(rng.normal(size=(k, d, d)), rng.normal(size=(k, d)), rng.normal(size=k), rng.normal(size=k))
    return NewtonReport(seen, rng.normal(size=(k, d)), 1.5, -0.25, 2.0, 0.5)


@given(arrays, st.integers(-(2**60), 2**60), st.floats(), st.text(max_size=20), st.booleans())
def test_what_was_written_is_read(array, whole, number, word, flag):
    body = {"a": (array, None), "b": {"c": [whole, number]}, "w": word, "f": flag}
    message = decode(encode(Envelope("run", 1, 2, body)))
    assert message.run == "run"
    assert (message.epoch, message.exchange) == (1, 2)
    read, nothing = message.body["a"]
    assert nothing is None
    assert read.shape == array.shape
    np.testing.assert_array_equal(read, array)
    assert message.body["b"]["c"][0] == whole
    np.testing.assert_equal(message.body["b"]["c"][1], number)
    assert (message.body["w"], message.body["f"]) == (word, flag)


def test_bits_of_numbers_survive():
    values = np.array([0.1, -0.0, 5e-324, 1.7976931348623157e308, np.inf, np.nan])
    assert decode(encode((values,)))[0].tobytes() == values.tobytes()
    assert decode(encode((0.1 + 0.2,)))[0] == 0.1 + 0.2


def test_any_cut_or_changed_length_is_refused():
    message = encode(Envelope("run", 0, 0, NewtonStep(np.ones((2, 3)))))
    for cut in range(len(message)):
        with pytest.raises(RecordError):
            decode(message[:cut])
    with pytest.raises(RecordError, match="checksum"):
        decode(message + b"x")
    with pytest.raises(RecordError, match="number differs"):
        decode(seal(message[22:] + b"x"))


def test_any_changed_bit_is_refused():
    message = encode(Envelope("run", 0, 0, NewtonStep(np.ones((2, 3)))))
    for at in range(8 * len(message)):
        changed = bytearray(message)
        changed[at // 8] ^= 1 << at % 8
        with pytest.raises(RecordError):
            decode(bytes(changed))


def test_records_of_earlier_versions_are_read():
    message = encode((np.arange(3), "x"))
    assert decode(b"covey\x02" + message[22:])[1] == "x"


@pytest.mark.parametrize("name", ["eval", "os.system", "Model", "Site", "covey.records.Count"])
def test_other_classes_are_not_built(name):
    head = json.dumps({"tree": {"is": name, "has": {}}, "arrays": []}).encode()
    with pytest.raises(RecordError, match=f"not a message of covey.*'{name}'"):
        decode(b"covey\x02" + len(head).to_bytes(4, "little") + head)


def test_arrays_of_objects_are_not_encoded_or_decoded():
    with pytest.raises(TypeError, match="arrays of"):
        encode(np.array([{}], dtype=object))
    head = json.dumps({"tree": {"array": 0}, "arrays": [["|O", [1]]]}).encode()
    with pytest.raises(RecordError):
        decode(b"covey\x02" + len(head).to_bytes(4, "little") + head + bytes(8))


@given(st.integers(0, 1000))
def test_a_reply_is_its_skeleton_and_its_numbers(seed):
    """A skeleton holds no number, so those of two replies are equal; adding the numbers adds the replies."""
    one, two = report(np.random.default_rng(seed)), report(np.random.default_rng(seed + 1))
    (first, a), (second, b) = split(one), split(two)
    assert encode(first) == encode(second)
    back = join(first, a)
    assert outline(back) == outline(one)
    np.testing.assert_array_equal(back.seen.C, one.seen.C)
    both = join(first, a + b)
    np.testing.assert_allclose(both.seen.C, one.seen.C + two.seen.C, rtol=1e-15)
    assert both.value == one.value + two.value


def test_exact_sums_stay_exact_through_split_and_join():
    value = (Exact.of(np.array([0.1, 1e20])), np.array([3]), 7)
    skeleton, numbers = split(value)
    back = join(decode(encode(skeleton)), numbers + numbers)
    np.testing.assert_array_equal(back[0].limbs, (value[0] + value[0]).limbs)
    assert back[1].tolist() == [6]
    assert back[1].dtype == np.int64
    assert back[2] == 14
