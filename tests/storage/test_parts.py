"""Uploads in parts, as whoever takes them sees it: in order, nothing twice, and what is lent as it is."""

from __future__ import annotations

import itertools
import random
import threading

import numpy as np
import pytest

from keepstep.errors import StorageError
from keepstep.storage.parts import PartLimits, PartUpload, Taker

PART = 1 << 12
LIMITS = PartLimits(most_parts=64, usual_bytes=PART, least_bytes=1)


class Kept(Taker):
    """Keeps the pieces, as they are."""

    def __init__(self) -> None:
        self.pieces: list[memoryview] = []
        self.whole = False

    def take_whole(self, name, data):
        self.pieces, self.whole = [data], True

    def take_parts(self, name, parts, part_bytes):
        self.pieces = [*parts]

    @property
    def data(self) -> bytes:
        return b"".join(self.pieces)


def content(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def test_what_is_lent_is_sent_without_a_copy():
    arena, taker = bytearray(content(8 * PART)), Kept()
    with PartUpload(taker, "x", PART + len(arena), LIMITS) as upload:
        upload.lend_at(0, memoryview(b"h" * PART))
        for at in range(0, len(arena), 2 * PART):
            upload.lend_at(PART + at, memoryview(arena)[at : at + 2 * PART])
        upload.commit(PART + len(arena))
    assert [piece.obj is arena for piece in taker.pieces] == [False, True, True, True, True]
    assert taker.data == b"h" * PART + arena


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, 5 * PART, 7 * PART + 123])
def test_pieces_in_any_order_make_the_object(seed, size):
    """Lent or written, with a tail beyond the end that is cut off, and holes that are zero."""
    dice = random.Random(seed)
    print(f"seed {seed}")
    padded = content(size + 100, seed)
    cuts = sorted({0, size + 100, *(dice.randrange(size + 100) for _ in range(dice.randrange(12)))})
    pieces = [(start, memoryview(padded)[start:stop]) for start, stop in itertools.pairwise(cuts)]
    expected = bytearray(padded[:size])
    if dice.random() < 0.5:
        start, gone = pieces.pop(dice.randrange(len(pieces)))
        expected[start : start + len(gone)] = bytes(max(0, min(len(gone), size - start)))
    dice.shuffle(pieces)
    taker = Kept()
    upload = PartUpload(taker, "x", size, LIMITS)
    ways = (
        [upload.write_at, upload.lend_at] if dice.random() < 0.5 else [dice.choice([upload.write_at, upload.lend_at])]
    )
    chosen = [dice.choice(ways) for _ in pieces]
    for way, piece in zip(chosen, pieces, strict=True):
        way(*piece)
    upload.commit(size)
    assert taker.data == bytes(expected)
    assert taker.whole == (size <= PART)


def test_several_threads_lend_at_once():
    arena, taker = bytearray(content(40 * PART)), Kept()
    upload = PartUpload(taker, "x", len(arena), LIMITS)
    starts = [*range(0, len(arena), PART)]

    def lend(own):
        for at in own:
            upload.lend_at(at, memoryview(arena)[at : at + PART])

    threads = [threading.Thread(target=lend, args=(starts[number::4],)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    upload.commit(len(arena))
    assert taker.data == arena
    assert len(taker.pieces) == 40


def test_what_was_lent_and_sent_is_not_lent_again():
    upload = PartUpload(Kept(), "x", 4 * PART, LIMITS)
    upload.lend_at(0, memoryview(content(2 * PART)))
    with pytest.raises(StorageError, match="byte 4,096 was sent already"):
        upload.lend_at(PART, memoryview(content(PART)))
    with pytest.raises(StorageError, match="8,192 bytes were sent already, more than the 4,096"):
        upload.commit(PART)
    upload.close()


def test_more_than_the_parts_that_a_store_takes_is_refused_before_it_is_sent():
    upload = PartUpload(Kept(), "x", 4 * PART, LIMITS)
    for write in (upload.lend_at, upload.write_at):
        with pytest.raises(StorageError, match="64 parts of 4,096 bytes"):
            write(63 * PART, memoryview(content(PART + 1)))
    upload.close()


def test_memory_of_parts_is_used_again_when_nobody_looks_at_it_and_gaps_are_zero():
    """What the taker still holds stays as it is; what it has let go of serves the next part, without its old bytes."""
    kept: list[memoryview] = []
    seen: list[bytes] = []
    addresses: list[int] = []

    class Holding(Taker):
        def take_whole(self, name, data):
            raise AssertionError("it has several parts")

        def take_parts(self, name, parts, part_bytes):
            for index, part in enumerate(parts):
                seen.append(bytes(part))
                addresses.append(np.frombuffer(part, np.uint8).ctypes.data)
                if index < 2:
                    kept.append(part)
                del part

    with PartUpload(Holding(), "x", 8 * PART, LIMITS) as upload:
        for index in range(7):
            upload.write_at(index * PART, memoryview(bytes([index + 1]) * PART))
        upload.write_at(7 * PART + 100, memoryview(b"z" * 50))
        upload.commit(8 * PART)
    assert [bytes(part) for part in kept] == [b"\1" * PART, b"\2" * PART]
    assert seen[:7] == [bytes([index + 1]) * PART for index in range(7)]
    assert seen[7] == bytes(100) + b"z" * 50 + bytes(PART - 150)
    assert len(set(addresses[:2])) == 2
    assert len(set(addresses)) <= 6, "the parts after those that are kept share a few places"


def test_copies_behind_what_was_lent_use_memory_again():
    """A header that is lent, then chunks that are copied: what was taken and let go of is the place of later ones."""
    addresses: list[int] = []
    seen = bytearray()
    kept: list[memoryview] = []

    class Passing(Kept):
        def take_parts(self, name, parts, part_bytes):
            for index, part in enumerate(parts):
                seen.extend(part)
                addresses.append(np.frombuffer(part, np.uint8).ctypes.data)
                if index == 1:
                    kept.append(part)
                del part

    data = content(9 * PART)
    with PartUpload(Passing(), "x", 9 * PART, LIMITS) as upload:
        upload.lend_at(0, memoryview(data[:PART]))
        for at in range(PART, 9 * PART, PART):
            upload.write_at(at, memoryview(data[at : at + PART]))
        upload.commit(9 * PART)
    assert seen == data
    assert kept[0] == data[PART : 2 * PART]
    assert addresses.count(addresses[1]) == 1, "what is still looked at was written over"
    assert len(set(addresses[2:])) <= 4
