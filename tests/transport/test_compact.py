"""Any int64 and any flags come back from the compact form, in the room foreseen for them."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hetrain.transport.compact import Reader, Writer, words_for

ANY = st.integers(-(1 << 63), (1 << 63) - 1)
SMALL = st.integers(0, 5)
INTEGERS = st.lists(st.one_of(ANY, SMALL), max_size=100) | st.lists(SMALL, max_size=200)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(INTEGERS, st.booleans(), st.lists(st.booleans(), max_size=100)), max_size=3))
def test_fields_come_back(fields):
    fields = [(np.array(sorted(v) if s else v, np.int64), np.array(f, bool)) for v, s, f in fields]
    writer = Writer(words_for([len(part) for field in fields for part in field]))
    for values, flags in fields:
        writer.count(len(values), 7)
        writer.integers(values)
        writer.flags(flags)
        writer.align(1)
    reader = Reader(writer.bytes())
    for values, flags in fields:
        assert reader.count(7) == len(values)
        assert np.array_equal(reader.integers(len(values)), values)
        assert np.array_equal(reader.flags(len(flags)), flags)
        reader.align(1)


def test_sizes():
    def nbytes(values):
        writer = Writer(words_for([len(values)]))
        writer.integers(np.array(values, np.int64))
        return writer.nbytes

    assert nbytes([]) == 0
    assert nbytes(range(10**6, 10**6 + 1600)) < 20  # one bit a block
    assert nbytes([(1 << 63) - 1, -(1 << 63)] * 800) < 1600 * 67 // 8 + 40
