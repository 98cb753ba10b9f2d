"""The storage contract over every storage there is, and over folders of them."""

from __future__ import annotations

import errno
import secrets
import shutil
from pathlib import Path

import pytest

from keepstep.check.contract import StorageContract
from keepstep.errors import StorageError
from keepstep.storage.base import Subfolder
from keepstep.storage.local import LocalStorage
from keepstep.storage.memory import MemoryStorage
from keepstep.storage.parts import PartLimits
from keepstep.storage.remote import RemoteStorage

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


def remote(server, library="obstore", **more):
    """A folder of its own in a bucket of the server."""
    url = f"{server.scheme}://{server.make_bucket('contract')}/{secrets.token_hex(4)}/run"
    return RemoteStorage(url, options=server.options(library=library), library=library, **more)


@pytest.mark.slow
class TestMoto(StorageContract):
    @pytest.fixture
    def storage(self, moto):
        return remote(moto)


@pytest.mark.slow
class TestMotoInSmallParts(StorageContract):
    """Every blob of more than a few pages in parts, as large ones are."""

    # A part that was sent cannot be written over. It is refused; see test_what_was_sent_is_not_written_again.
    test_the_order_of_writes_does_not_matter = None

    @pytest.fixture
    def storage(self, moto_of_small_parts):
        limits = PartLimits(usual_bytes=3 * 4096, least_bytes=4096)
        return remote(moto_of_small_parts, limits=limits)


@pytest.mark.slow
class TestFolderOfMoto(StorageContract):
    @pytest.fixture
    def storage(self, moto):
        whole = remote(moto)
        whole.put("beside/x", b"must not be seen")
        whole.put("steps/one-more/x", b"must not be seen")
        return Subfolder(whole, "steps/one")


@pytest.mark.slow
class TestRclone(StorageContract):
    """A server that overlooks conditions, and answers a range under the status of a whole object."""

    # It replaces an object in place: readers meanwhile see a mixture. Nothing in a client can mend that.
    test_readers_of_a_replaced_blob_see_one_or_the_other = None
    test_appended_lines_stay_whole = None

    @pytest.fixture
    def storage(self, rclone):
        return remote(rclone)

    def test_put_over_has_one_winner_among_threads(self, storage):
        """Of several writes of one name at once it has kept none, once in hundreds of times: then they are made again."""
        for left in (2, 1, 0):
            try:
                super().test_put_over_has_one_winner_among_threads(storage)
            except StorageError as err:
                if err.errno != errno.ENOENT or not left:
                    raise
            else:
                return


@pytest.mark.slow
class TestGoogleDialect(StorageContract):
    @pytest.fixture
    def storage(self, gcs):
        return remote(gcs)


@pytest.mark.slow
class TestGoogleThroughFsspec(StorageContract):
    @pytest.fixture
    def storage(self, fake_gcs):
        return remote(fake_gcs, "fsspec")


@pytest.mark.slow
class TestAzure(StorageContract):
    @pytest.fixture
    def storage(self, azurite):
        return remote(azurite)


@pytest.mark.slow
@pytest.mark.soak
class TestAzureThroughFsspec(StorageContract):
    # A question mark begins the version of a blob there. It is refused; see test_names_that_a_library_cannot_reach.
    test_names_of_every_kind = None

    @pytest.fixture
    def storage(self, azurite):
        return remote(azurite, "fsspec")


@pytest.mark.slow
class TestMotoThroughFsspec(StorageContract):
    @pytest.fixture
    def storage(self, moto):
        return remote(moto, "fsspec")


class TestFsspecMemory(StorageContract):
    @pytest.fixture
    def storage(self):
        return RemoteStorage(f"memory://{secrets.token_hex(4)}/run")


@pytest.mark.slow
class TestFsspecFiles(StorageContract):
    """A file system that moves files, as those behind a login do."""

    @pytest.fixture
    def storage(self, tmp_path):
        return RemoteStorage(f"local://{tmp_path}/run")


def test_a_folder_of_a_folder_is_named_by_its_path(tmp_path):
    whole = LocalStorage(tmp_path)
    inner = Subfolder(Subfolder(whole, "a"), "b/c")
    inner.put("x", b"1")
    assert inner.url == f"{tmp_path}/a/b/c"
    assert dict(whole.list("")) == {"a/b/c/x": 1}
    assert (tmp_path / "a/b/c/x").read_bytes() == b"1"
