import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from keepstep.data.order import Cut, Order, mix
from keepstep.errors import UsageError

TAILS = ("short", "drop", "pad")


@st.composite
def cuts(draw):
    world = draw(st.integers(1, 9))
    size = draw(st.integers(world, 40))
    return Cut(draw(st.integers(max(size, 1), 200)), size, world, draw(st.sampled_from(TAILS)))


@settings(max_examples=30)
@given(st.integers(1, 3000), st.integers(0, 2**64 - 1), st.integers(0, 10**6))
@example(1, 0, 0)
@example(2, 0, 0)
@example(2048, -5, 3)
@example(2049, 7, 3)
def test_an_order_has_every_sample_once(samples, seed, epoch):
    assert sorted(Order(samples, seed).ids(epoch, range(samples))) == list(range(samples))


def test_an_order_is_the_same_wherever_it_is_asked_for():
    order = Order(1_000_003, seed=3)
    whole = order.ids(1, range(500))
    assert order.ids(1, range(490, 500)) == whole[490:]
    assert order.ids(1, [7, 3, 7]) == [whole[7], whole[3], whole[7]]
    assert order.ids(1, []) == []


def test_an_order_does_not_change_from_version_to_version():
    """A checkpoint holds a position in it: what stands there must be the same in ten years."""
    assert Order(10, seed=0).ids(0, range(10)) == [8, 9, 7, 2, 1, 0, 3, 5, 6, 4]
    assert Order(10**12, seed=1).ids(2, [0, 10**12 - 1]) == [970633211090, 711360836057]
    assert mix(1, 2, 3) == 0x7C68B4906E7EA780


@pytest.mark.slow
@pytest.mark.parametrize("samples", [3, 4, 5])
def test_every_order_of_a_few_samples_is_equally_likely(samples):
    each = 20
    orders = math.factorial(samples)
    found = Counter(tuple(Order(samples, seed).ids(0, range(samples))) for seed in range(each * orders))
    spread = sum((found[order] - each) ** 2 / each for order in itertools.permutations(range(samples)))
    # Chi-square of so many degrees of freedom, five standard deviations.
    assert spread < orders - 1 + 5 * math.sqrt(2 * (orders - 1))


def test_neighbours_and_epochs_have_nothing_in_common():
    order = Order(100_000, seed=1)
    first = np.array(order.ids(0, range(100_000)))
    assert abs(np.corrcoef(first, np.arange(100_000))[0, 1]) < 0.02
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 0.02
    assert abs(np.corrcoef(first, order.ids(1, range(100_000)))[0, 1]) < 0.02
    assert abs(np.corrcoef(first, Order(100_000, seed=2).ids(0, range(100_000)))[0, 1]) < 0.02


def test_without_shuffling_samples_come_as_they_lie():
    assert Order(5, shuffle=False).ids(3, [4, 0, 2]) == [4, 0, 2]


@given(cuts(), st.data())
def test_batches_cover_the_rest_of_an_epoch(cut, data):
    start = data.draw(st.integers(0, cut.samples))
    batches = list(cut.batches(start))
    assert len(batches) == cut.count(start)
    stops = [batch.stop for batch in batches]
    assert [batch.start for batch in batches] == [start, *stops][: len(batches)]
    left = cut.samples - (stops[-1] if stops else start)
    assert left < cut.size if cut.tail == "drop" else left == 0
    assert all(batch.size == cut.size for batch in batches[:-1])
    if cut.tail != "short":
        assert all(batch.size == cut.size for batch in batches)
    elif batches:
        assert cut.world <= batches[-1].size < cut.size + cut.world


@given(cuts(), st.data())
def test_shares_are_the_global_batch_in_its_order(cut, data):
    for batch in cut.batches(data.draw(st.integers(0, cut.samples))):
        shares = [cut.share(batch, rank) for rank in range(cut.world)]
        assert list(itertools.chain(*shares)) == list(range(batch.start, batch.start + batch.size))
        sizes = [len(share) for share in shares]
        assert min(sizes) >= 1
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.slow
@given(st.data(), st.sampled_from(TAILS), st.integers(1, 120))
def test_through_any_worlds_and_cuts_no_sample_is_lost_or_repeated(data, tail, samples):
    """One epoch, consumed by other numbers of ranks with other sizes of batches, one after the other."""
    order = Order(samples, seed=data.draw(st.integers(0, 5)))
    seen: list[int] = []
    start, repeats = 0, 0
    while start < samples:
        world = data.draw(st.integers(1, min(4, samples)))
        size = data.draw(st.integers(world, min(24, samples) if samples >= world else world))
        cut = Cut(samples, size, world, tail)
        for batch in itertools.islice(cut.batches(start), data.draw(st.integers(1, 4))):
            for rank in range(world):
                seen += order.ids(0, np.array(cut.share(batch, rank)) % samples)
            repeats += batch.size - (batch.stop - batch.start)
            start = batch.stop
        if cut.next_batch(start) is None:
            break
    found = Counter(seen)
    if tail == "drop":
        assert max(found.values(), default=1) == 1
        assert samples - len(found) < 24
    else:
        assert len(found) == samples
        assert sum(found.values()) == samples + repeats
        assert repeats < (24 if tail == "pad" else 4)


@pytest.mark.parametrize(
    ("tail", "sizes", "counts"),
    [
        ("short", [8, 8, 3], [2, 3, 3]),
        ("drop", [8, 8], [2, 3, 3]),
        ("pad", [8, 8, 8], [2, 3, 3]),
    ],
)
def test_tails(tail, sizes, counts):
    cut = Cut(19, 8, 3, tail)
    batches = list(cut.batches())
    assert [batch.size for batch in batches] == sizes
    assert [len(cut.share(batches[0], rank)) for rank in range(3)] == counts


def test_fewer_samples_than_ranks_join_the_batch_before():
    """Three ranks and two samples left over: a rank without a batch would leave the others waiting."""
    cut = Cut(18, 8, 3, "short")
    assert [batch.size for batch in cut.batches()] == [8, 10]
    assert [len(cut.share(batch, rank)) for batch in cut.batches() for rank in range(3)] == [2, 3, 3, 3, 3, 4]


def test_fewer_samples_than_ranks_after_a_resume_are_repeated():
    cut = Cut(18, 8, 3, "short")
    (last,) = cut.batches(16)
    assert [list(cut.share(last, rank)) for rank in range(3)] == [[16], [17], [18]]


def test_what_cannot_be_dealt_is_refused_at_once():
    with pytest.raises(UsageError) as caught:
        Cut(0, 2, 4, "truncate")
    text = str(caught.value)
    assert "tail='truncate'" in text
    assert "empty" in text
    assert "2 samples leaves some of 4 ranks" in text
    with pytest.raises(UsageError, match="5 samples fill no global batch of 8"):
        Cut(5, 8, 2, "drop")
    with pytest.raises(UsageError, match="too few for 8 ranks"):
        Cut(5, 8, 8, "short")
