"""Reads over a wire: few requests, large ones, many at once, and hardly a byte that nobody needs."""

from __future__ import annotations

import threading

import pytest
import torch

import keepstep as ks
from keepstep.errors import CorruptError, StagingError, StorageError
from keepstep.storage.base import Blob
from keepstep.storage.memory import MemoryStorage

REQUEST = 1 << 20


class Far(MemoryStorage):
    """Counts what is read of shard files: (name, offset, bytes). ``meet`` is waited at by every opening of one."""

    request_bytes, requests_at_once = REQUEST, 4

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, int, int]] = []
        self.meet = lambda: None
        self.open_now = 0

    def open(self, name):
        if name.endswith(".safetensors") and name.startswith("model"):
            self.meet()
        blob = Counted(self, name, super().open(name))
        self.open_now += 1
        return blob

    def data_of(self, folder):
        """The reads of one folder's files that are not of a header."""
        return [each for each in self.asked if each[0].startswith(folder) and each[2] != 4096]


class Counted(Blob):
    def __init__(self, storage, name, blob):
        self.storage, self.name, self.blob, self.size_bytes = storage, name, blob, blob.size_bytes

    def read_into(self, offset, buffer):
        self.storage.asked.append((self.name, offset, len(buffer)))
        self.blob.read_into(offset, buffer)

    def close(self):
        self.storage.open_now -= 1
        self.blob.close()


def tensors(*kib):
    """Tensors of so many KiB and a bit, so that none but the first begins with a block."""
    return {f"w{number}": torch.arange(size * 256 + 5) * 1.0 for number, size in enumerate(kib)}


def test_neighbours_are_read_together_and_every_request_is_large():
    storage, state = Far(), {"model": tensors(3000, 200, 1, 2500, 17)}
    ks.save(storage, state)
    target = {"model": {key: torch.zeros_like(value) for key, value in state["model"].items()}}
    ks.load(storage, target)
    assert all(torch.equal(target["model"][key], value) for key, value in state["model"].items())
    sizes = [size for _, _, size in storage.data_of("model")]
    needed = sum(value.nbytes for value in state["model"].values())
    assert len(sizes) <= -(-needed // REQUEST) + 1
    assert max(sizes) <= REQUEST
    assert sum(sizes) <= needed + len(sizes) * 2 * (1 << 16)


@pytest.mark.parametrize(("gap_kib", "requests"), [(130, 1), (400, 2)])
def test_a_small_gap_is_read_and_a_large_one_is_not(gap_kib, requests):
    """A gap of one block, and one of several, behind 3,000 KiB."""
    storage, state = Far(), {"model": tensors(3000, gap_kib, 900)}
    storage.request_bytes = 4 * REQUEST
    ks.save(storage, state)
    wanted = {key: torch.zeros_like(value) for key, value in state["model"].items() if key != "w1"}
    ks.load(storage, {"model": wanted}, strict=False)
    assert all(torch.equal(value, state["model"][key]) for key, value in wanted.items())
    sizes = [size for _, _, size in storage.data_of("model")]
    assert len(sizes) == requests, sizes
    assert sum(sizes) <= 1.05 * sum(value.nbytes for value in wanted.values())


def test_headers_of_several_files_are_asked_for_at_once():
    """None of the two openings is answered before the other one has come."""
    storage, state = Far(), {"model": tensors(2), "model2": tensors(3)}
    ks.save(storage, state)
    both = threading.Barrier(2, timeout=20)
    storage.meet = both.wait
    target = {name: {"w0": torch.zeros_like(state[name]["w0"])} for name in state}
    ks.load(storage, target)
    assert all(torch.equal(target[name]["w0"], state[name]["w0"]) for name in state)


def test_a_file_that_goes_while_several_are_opened_is_an_error_that_names_it():
    """And those that were opened are closed."""
    storage, state = Far(), {"model": tensors(2), "model2": tensors(3)}
    ks.save(storage, state)
    (lost,) = [name for name, _ in storage.list("model2")]
    storage.meet = lambda: storage.delete([lost])
    target = {name: {"w0": torch.zeros_like(state[name]["w0"])} for name in state}
    with pytest.raises((StorageError, CorruptError), match=lost):
        ks.load(storage, target)
    assert storage.open_now == 0
    assert not target["model"]["w0"].any()


def test_a_state_that_changes_while_it_is_sent_is_not_committed():
    """Its header was sent first: what comes after must be what the header says."""

    class Changing(MemoryStorage):
        def create(self, name, size_hint_bytes):
            upload = super().create(name, size_hint_bytes)
            upload.in_order, lend_at = True, upload.lend_at

            def changed(offset, data):
                if offset == 0 and name.startswith("model"):
                    state["model"]["w0"][7] = -1.0
                lend_at(offset, data)

            upload.lend_at = changed
            return upload

    storage, state = Changing(), {"model": tensors(100)}
    with pytest.raises(StagingError, match="changed while it was being saved") as caught:
        ks.save(storage, state)
    assert "Nothing was committed" in str(caught.value)
    assert not [name for name, _ in storage.list("") if name.endswith(".metadata")]


@pytest.mark.parametrize(("spoilt", "loads"), [(1, True), (2, False)])
@pytest.mark.parametrize("request_bytes", [REQUEST, 0])
def test_a_block_that_was_spoilt_on_the_way_is_asked_for_once_more(spoilt, loads, request_bytes):
    """Over a wire, once: what is wrong at the store stays wrong. On a disk there is no way."""
    storage, state = Far(), {"model": tensors(300, 20)}
    storage.request_bytes = request_bytes
    ks.save(storage, state)
    real, left = Counted.read_into, [spoilt]

    def read_into(blob, offset, buffer):
        real(blob, offset, buffer)
        if blob.name.startswith("model") and len(buffer) > 4096 and left[0]:
            left[0] -= 1
            buffer[0] ^= 1

    target = {"model": {key: torch.zeros_like(value) for key, value in state["model"].items()}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Counted, "read_into", read_into)
        if loads and request_bytes:
            ks.load(storage, target)
            assert all(torch.equal(target["model"][key], value) for key, value in state["model"].items())
            again = storage.data_of("model")[-1]
            assert again[2] <= 1 << 16, "one block"
        else:
            with pytest.raises(CorruptError, match=r"model/rank-00000.*block at byte"):
                ks.load(storage, target)
