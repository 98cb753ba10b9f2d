import gc

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import keepstep as ks
from keepstep.data import PackingCollator, ResumableLoader
from keepstep.data.holding import joined, parted
from keepstep.errors import MismatchError, UsageError
from tests.data.loops import Numbers, flat
from tests.helpers.same import assert_same


class Texts(Numbers):
    """Sample i is i times the token i."""

    def __getitem__(self, number):
        return [number] * number


def test_blocks_are_the_sequences_one_after_the_other():
    pack = PackingCollator(4, separator=0)
    assert pack([[1, 1], [2, 2, 2]]).tolist() == [[1, 1, 0, 2]]
    assert pack([]).tolist() == []
    assert pack([[3], torch.tensor([4, 4], dtype=torch.int32), np.array([5])]).tolist() == [[2, 2, 0, 3], [0, 4, 4, 0]]
    assert_same(pack.state_dict(), {"block": 4, "separator": 0, "left": torch.tensor([5, 0])})


@pytest.mark.case(146)
def test_left_over_tokens_come_back_with_the_position(tmp_path):
    def made():
        pack = PackingCollator(7)
        loader = ResumableLoader(Texts(30), batch_size=3, collate_fn=pack)
        return loader, ks.TrainState(data=loader, packing=pack.per_rank())

    loader, _ = made()
    whole = [batch.tolist() for _ in range(2) for batch in loader]
    seen = []
    for batches in (4, 5, 11):
        loader, state = made()
        with ks.Checkpointer(tmp_path, state, background="off") as ckpt:
            ckpt.restore()
            while batches:
                for batch in loader:
                    seen.append(batch.tolist())
                    ckpt.step()
                    batches -= 1
                    if not batches:
                        break
            ckpt.save()
    assert seen == whole
    assert sum(map(len, flat(seen))) == 2 * sum(range(30)) // 7 * 7


def test_left_over_tokens_are_dealt_anew(rank_pool, tmp_path):
    rank_pool(3)(pack_and_save, tmp_path)
    left = rank_pool(2)(load_left, tmp_path)
    assert left == [[0, 10, 2, 12], [1, 11]]


def pack_and_save(rank, root):
    pack = PackingCollator(4)
    pack([[rank, rank + 10]])
    ks.save(root, {"packing": pack.per_rank()})


def load_left(rank, root):
    pack = PackingCollator(4)
    ks.load(root, into={"packing": pack.per_rank()})
    return pack.state_dict()["left"].tolist()


@pytest.mark.slow
def test_packing_in_workers_of_a_loader_is_refused():
    loader = DataLoader(Texts(4), batch_size=2, num_workers=1, collate_fn=PackingCollator(2))
    with pytest.raises(UsageError, match="StreamReader with pack="):
        next(iter(loader))
    gc.collect()  # torch takes seconds to let go of a worker that has raised: here, and not in the test that comes next


def test_other_blocks_and_separators_are_refused():
    with pytest.raises(UsageError, match="at least one token"):
        PackingCollator(0)
    with pytest.raises(MismatchError) as caught:
        PackingCollator(4).load_state_dict(PackingCollator(5, separator=1).state_dict())
    assert caught.value.mismatches == ("block: saved 5, now 4", "separator: saved 1, now None")


def test_items_in_a_buffer_come_back_as_they_were(tmp_path):
    items = [
        torch.arange(3),
        {"ids": torch.ones(2, 2, dtype=torch.bfloat16), 7: ("text", None, torch.tensor(5.0))},
        [torch.empty(0, 4), ["tensor", "torch.int64", 0, 1]],
        np.arange(4),
        (),
        torch.zeros(2),
    ]
    state = {"held": ks.per_rank(joined(items))}
    assert len(state["held"].value["tensors"]) == 3
    ks.save(tmp_path, state)
    into = {"held": ks.per_rank({})}
    ks.load(tmp_path, into=into)
    assert_same(parted(into["held"].value), items)
