"""The storage contract over every storage there is, and over folders of them."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path

import pytest

from keepstep.check.contract import StorageContract
from keepstep.storage.base import Subfolder
from keepstep.storage.local import LocalStorage
from keepstep.storage.memory import MemoryStorage

SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture
def shared_memory():
    """A folder on a file system that takes no direct I/O on most kernels."""
    if not SHARED_MEMORY.is_dir():
        pytest.skip("no /dev/shm here")
    folder = SHARED_MEMORY / f"keepstep-{secrets.token_hex(8)}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


class TestLocal(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path):
        return LocalStorage(tmp_path / "made on the first write")


class TestLocalInSharedMemory(StorageContract):
    @pytest.fixture
    def storage(self, shared_memory):
        return LocalStorage(shared_memory)


class TestMemory(StorageContract):
    @pytest.fixture
    def storage(self):
        return MemoryStorage()


class TestFolderOfLocal(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path):
        whole = LocalStorage(tmp_path)
        whole.put("beside/x", b"must not be seen")
        return Subfolder(whole, "steps/one")


class TestFolderOfMemory(StorageContract):
    @pytest.fixture
    def storage(self):
        whole = MemoryStorage()
        whole.put("beside/x", b"must not be seen")
        whole.put("steps/one-more/x", b"must not be seen")
        return Subfolder(whole, "steps/one")


def test_a_folder_of_a_folder_is_named_by_its_path(tmp_path):
    whole = LocalStorage(tmp_path)
    inner = Subfolder(Subfolder(whole, "a"), "b/c")
    inner.put("x", b"1")
    assert inner.url == f"{tmp_path}/a/b/c"
    assert dict(whole.list("")) == {"a/b/c/x": 1}
    assert (tmp_path / "a/b/c/x").read_bytes() == b"1"
