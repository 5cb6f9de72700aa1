"""Whole numbers in few bits: a stream of 64-bit words, written and read from its lowest bit on.

Row numbers of one message ascend, so that what separates neighbours is small where rows are dense; clocks are small
for rows seldom updated. Both spread over many orders of magnitude, so each block of BLOCK numbers is written in
the code of order k that suits it best: the count of bits beyond k in unary, then those bits but the highest, which is
1, and the lowest k. Any int64 comes back as it was, in any order.
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from hetrain.store.index import Ints

BLOCK = 16  # numbers that share a code; fewer cost more for codes than they save, also where density varies
WORST_BITS = 67  # of a number: in the code of order 62, with its share of what tells the code
FIELD_WORDS = (
    8  # at most, of a field beyond that: 4 numbers of 7 + 64 bits and their marks, a code, what aligning skips
)

Words = NDArray[np.uint64]
Whole = int | np.int64
ZEROS = 63  # the code of a block that has nothing else; other codes are orders
_ONE = np.uint64(1)


def words_for(counts: list[int]) -> int:
    """Words that fields of `counts` numbers, or flags, fill at most."""
    return sum(count * WORST_BITS // 64 + FIELD_WORDS for count in counts)


class Writer:
    """Appends to words that are large enough and zero."""

    def __init__(self, words: int) -> None:
        """`words`: how many there are."""
        self._words = np.zeros(words, np.uint64)
        self._at: Whole = 0  # bits written

    @property
    def nbytes(self) -> int:
        """Bytes begun."""
        return int(-(-self._at // 8))

    def align(self, nbytes: int) -> None:
        """Go on at the next multiple of `nbytes`."""
        self._at += -self._at % (8 * nbytes)

    def bits(self, value: int, count: int) -> None:
        """The lowest `count` (at most 63) bits of `value`."""
        _put(self._words, self._at, np.uint64(value), count)
        self._at += count

    def count(self, value: int, before: int) -> None:
        """A count, 0 or more; one bit where it is `before`."""
        self.bits(int(value == before), 1)
        if value != before:
            self._at = _put_number(self._words, self._at, np.uint64(value))

    def integers(self, values: Ints) -> None:
        """Any int64 [n]; smallest where they ascend."""
        self._at = _put_integers(self._words, self._at, values)

    def flags(self, flags: NDArray[np.bool_]) -> None:
        """Flags [n] as the positions where they change."""
        if len(flags):
            changes = 1 + np.flatnonzero(flags[1:] != flags[:-1])
            self.bits(int(flags[0]), 1)
            self.count(len(changes), 0)
            self.integers(changes)

    def bytes(self) -> NDArray[np.uint8]:
        """All that was written."""
        return self._words.view(np.uint8)[: self.nbytes]


class Reader:
    """Reads what a Writer wrote, by the same calls in the same order."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        """`data`: the Writer's bytes."""
        self._words = np.zeros(-(-len(data) // 8), np.uint64)
        self._words.view(np.uint8)[: len(data)] = data
        self._at: Whole = 0

    def align(self, nbytes: int) -> None:
        """See Writer."""
        self._at += -self._at % (8 * nbytes)

    def bits(self, count: int) -> int:
        """See Writer."""
        value = int(_get(self._words, self._at, count))
        self._at += count
        return value

    def count(self, before: int) -> int:
        """See Writer."""
        if self.bits(1):
            return before
        value, self._at = _get_number(self._words, self._at)
        return int(value)

    def integers(self, count: int) -> Ints:
        """See Writer; [count] int64."""
        values = np.empty(count, np.int64)
        self._at = _get_integers(self._words, self._at, values)
        return values

    def flags(self, count: int) -> NDArray[np.bool_]:
        """See Writer; [count] bool."""
        flags = np.zeros(count, bool)
        if count:
            flags[0] = self.bits(1)
            flags[self.integers(self.count(0))] = True
            np.logical_xor.accumulate(flags, out=flags)
        return flags


@njit(cache=True, nogil=True, inline="always")
def _put(words: Words, at: Whole, value: np.uint64, count: Whole) -> None:
    """`count` (0 to 64) bits of `value`, which has no others, at bit `at`."""
    if count:
        word, shift = at >> 6, at & 63
        words[word] |= value << np.uint64(shift)
        if shift + count > 64:
            words[word + 1] |= value >> np.uint64(64 - shift)


@njit(cache=True, nogil=True, inline="always")
def _get(words: Words, at: Whole, count: Whole) -> np.uint64:
    if count == 0:
        return np.uint64(0)
    word, shift = at >> 6, at & 63
    value = words[word] >> np.uint64(shift)
    if shift + count > 64:
        value |= words[word + 1] << np.uint64(64 - shift)
    found: np.uint64 = value & (~np.uint64(0) >> np.uint64(64 - count))
    return found


@njit(cache=True, nogil=True, inline="always")
def _length(value: np.uint64) -> Whole:
    """Bits of `value`; 0 has none."""
    length = 0
    for step in (32, 16, 8, 4, 2, 1):
        if value >> np.uint64(step):
            length += step
            value >>= np.uint64(step)
    return length + np.int64(value)


@njit(cache=True, nogil=True)
def _put_number(words: Words, at: Whole, value: np.uint64) -> Whole:
    """Its length in 7 bits, then itself; where the next bit goes."""
    length = _length(value)
    _put(words, at, np.uint64(length), 7)
    _put(words, at + 7, value, length)
    return at + 7 + length


@njit(cache=True, nogil=True)
def _get_number(words: Words, at: Whole) -> tuple[np.uint64, Whole]:
    length = np.int64(_get(words, at, 7))
    return _get(words, at + 7, length), at + 7 + length


@njit(cache=True, nogil=True)
def _put_signed(words: Words, at: Whole, value: np.int64) -> Whole:
    """Small where `value` is near 0, on either side."""
    return _put_number(words, at, np.uint64((value << 1) ^ (value >> 63)))


@njit(cache=True, nogil=True)
def _get_signed(words: Words, at: Whole) -> tuple[np.int64, Whole]:
    value, at = _get_number(words, at)
    half = np.int64(value >> _ONE)
    return (~half if value & _ONE else half), at


@njit(cache=True, nogil=True)
def _put_integers(words: Words, at: Whole, values: Ints) -> Whole:
    """One bit whether they ascend, the first then, the least of the numbers (or steps), and how far each exceeds it."""
    count = len(values)
    if count == 0:
        return at
    low, step, ascending = values[0], ~np.uint64(0), True
    for i in range(1, count):
        low = min(low, values[i])
        ascending &= values[i] >= values[i - 1]
        step = min(step, np.uint64(values[i]) - np.uint64(values[i - 1]))  # differences may exceed int64, not uint64
    excess = np.empty(count, np.uint64)
    _put(words, at, np.uint64(ascending), 1)
    at = _put_signed(words, at + 1, low)
    if not ascending:
        for i in range(count):
            excess[i] = np.uint64(values[i]) - np.uint64(low)
        return _put_blocks(words, at, excess)
    if count == 1:
        return at
    at = _put_number(words, at, step)
    for i in range(1, count):
        excess[i - 1] = np.uint64(values[i]) - np.uint64(values[i - 1]) - step
    return _put_blocks(words, at, excess[:-1])


@njit(cache=True, nogil=True)
def _get_integers(words: Words, at: Whole, out: Ints) -> Whole:
    count = len(out)
    if count == 0:
        return at
    ascending = _get(words, at, 1)
    low, at = _get_signed(words, at + 1)
    value = np.uint64(low)
    if not ascending:
        at = _get_blocks(words, at, out)
        for i in range(count):
            out[i] = np.int64(np.uint64(out[i]) + value)
        return at
    out[0] = low
    if count == 1:
        return at
    step, at = _get_number(words, at)
    at = _get_blocks(words, at, out[1:])
    for i in range(1, count):
        value += np.uint64(out[i]) + step
        out[i] = np.int64(value)
    return at


@njit(cache=True, nogil=True)
def _put_blocks(words: Words, at: Whole, numbers: Words) -> Whole:
    """Per block its code: one bit where it is as before, else 7; then the numbers, none for code ZEROS."""
    lengths, amounts = np.empty(BLOCK, np.int64), np.zeros(65, np.int64)
    code: Whole = ZEROS
    for first in range(0, len(numbers), BLOCK):
        block, before = numbers[first : first + BLOCK], code
        for i in range(len(block)):
            lengths[i] = _length(block[i])
            amounts[lengths[i]] += 1
        code = ZEROS if amounts[0] == len(block) else _best_order(amounts, before)
        for i in range(len(block)):
            amounts[lengths[i]] = 0
        _put(words, at, np.uint64(code << 1) if code != before else _ONE, 1 if code == before else 7)
        at += 1 if code == before else 7
        if code == ZEROS:
            continue
        for i in range(len(block)):
            beyond = max(lengths[i] - code, 0)
            if beyond < 64:
                _put(words, at + beyond, _ONE, 1)  # as many zeros before it
            at += min(beyond + 1, 64)  # 64 zeros need no end
            rest = code + max(beyond - 1, 0)
            _put(words, at, block[i] & (~np.uint64(0) >> np.uint64(64 - rest)) if rest else np.uint64(0), rest)
            at += rest
    return at


@njit(cache=True, nogil=True)
def _best_order(amounts: Ints, before: Whole) -> Whole:
    """The order, 0 to 62, that needs the fewest bits; `amounts` [65] of numbers by length."""
    best, fewest = 0, np.int64(1) << 62
    shortest, longest = 64, 0
    for length in range(65):
        if amounts[length]:
            shortest, longest = min(shortest, length), length
    for order in range(min(max(shortest - 1, 0), 62), min(longest, 62) + 1):
        bits = 0 if order == before else 6
        for length in range(shortest, longest + 1):
            beyond = max(length - order, 0)
            bits += amounts[length] * (1 + order + beyond + max(beyond - 1, 0))
        if bits < fewest:
            best, fewest = order, np.int64(bits)
    return best


@njit(cache=True, nogil=True)
def _get_blocks(words: Words, at: Whole, out: Ints) -> Whole:
    code: Whole = ZEROS
    for first in range(0, len(out), BLOCK):
        end = min(first + BLOCK, len(out))
        same = _get(words, at, 1)
        if not same:
            code = np.int64(_get(words, at + 1, 6))
        at += 1 if same else 7
        if code == ZEROS:
            out[first:end] = 0
            continue
        for i in range(first, end):
            beyond = 0
            while beyond < 64 and not (words[at >> 6] >> np.uint64(at & 63)) & _ONE:
                beyond += 1
                at += 1
            at += beyond < 64
            rest = code + max(beyond - 1, 0)
            value = _get(words, at, rest)
            out[i] = np.int64(value | _ONE << np.uint64(rest) if beyond else value)
            at += rest
    return at
