"""What goes on its way from its beginning is given its header first, wherever that can be known; the bytes are the same."""

from __future__ import annotations

import threading

import pytest
import torch

import keepstep as ks
from keepstep.storage.memory import MemoryStorage


class InOrder(MemoryStorage):
    """Notes where each write of a blob begins; says that it sends them in their order."""

    def __init__(self, *, in_order: bool) -> None:
        super().__init__()
        self.in_order, self.offsets = in_order, {}

    def create(self, name, size_hint_bytes):
        upload = super().create(name, size_hint_bytes)
        write_at, begun = upload.write_at, self.offsets.setdefault(name, [])

        def noted(offset, data):
            begun.append(offset)
            write_at(offset, data)

        upload.in_order, upload.write_at = self.in_order, noted
        return upload


def saved(*, in_order, call):
    """Where the writes of the model's file began, and the storage."""
    storage = InOrder(in_order=in_order)
    state = {"model": {"w": torch.arange(3 << 20, dtype=torch.int32)}, "n": 1}
    call(storage, state)
    target = {"model": {"w": torch.zeros(3 << 20, dtype=torch.int32)}, "n": 0}
    ks.load(storage, target)
    assert torch.equal(target["model"]["w"], state["model"]["w"])
    assert target["n"] == 1
    (offsets,) = [each for name, each in storage.offsets.items() if name.startswith("model/")]
    return offsets


def in_background(storage, state):
    ks.async_save(storage, state, background="thread", staging="block").wait_committed(30)


@pytest.mark.slow
def test_the_header_is_first_where_all_data_is_there():
    """In a save in the background it is; a save at once looks at all of it twice. Else digests are made on the way."""
    for call in (in_background, ks.save):
        assert saved(in_order=True, call=call)[0] == 0
        assert saved(in_order=False, call=call)[-1] == 0


def test_files_that_are_sent_come_to_their_end_together():
    """The ends of three files wait for one another here: none would come if they came in turn."""
    together = threading.Barrier(3, timeout=20)

    class Meeting(InOrder):
        def create(self, name, size_hint_bytes):
            upload = super().create(name, size_hint_bytes)
            commit = upload.commit

            def met(size_bytes):
                together.wait()
                commit(size_bytes)

            upload.commit = met
            return upload

    storage = Meeting(in_order=True)
    state = {"model": {"w": torch.arange(9)}, "ema": {"w": torch.arange(5)}, "n": 1}
    ks.save(storage, state)
    target = {"model": {"w": torch.zeros(9).long()}, "ema": {"w": torch.zeros(5).long()}, "n": 0}
    ks.load(storage, target)
    assert torch.equal(target["ema"]["w"], state["ema"]["w"])
    assert target["n"] == 1
