"""The contract notices storages that do not keep it: each of these breaks one promise, as real ones have."""

from __future__ import annotations

import time

import pytest

from keepstep.check.contract import StorageContract
from keepstep.storage.memory import MemoryStorage


class SilentlyShort(MemoryStorage):
    """Fills what there is and says nothing about the rest."""

    def open(self, name):
        blob = super().open(name)
        read_into = blob.read_into

        def short(offset, buffer):
            there = max(0, min(len(buffer), blob.size_bytes - offset))
            read_into(min(offset, blob.size_bytes), buffer[:there])

        blob.read_into = short
        return blob


class PublishesOnClose(MemoryStorage):
    """What was written so far becomes the blob when a with-block is left, by an error too."""

    def create(self, name, size_hint_bytes):
        upload = super().create(name, size_hint_bytes)
        written, close, write_at = [0], upload.close, upload.write_at

        def write(offset, data):
            write_at(offset, data)
            written[0] = max(written[0], offset + len(data))

        def publish():
            if written[0] >= 0:
                upload.commit(written[0])
            close()

        commit = upload.commit

        def committed(size_bytes):
            commit(size_bytes)
            written[0] = -1

        upload.write_at, upload.close, upload.commit = write, publish, committed
        return upload


class KeepsThePadding(MemoryStorage):
    """Rounds sizes up to what was written."""

    def create(self, name, size_hint_bytes):
        upload = super().create(name, size_hint_bytes)
        commit = upload.commit
        upload.commit = lambda size_bytes: commit(-(-size_bytes // 4096) * 4096)
        return upload


class LooksThenLeaps(MemoryStorage):
    """Creates if absent in two steps."""

    def put_new(self, name, data):
        if name in dict(self.list("")):
            return False
        time.sleep(0.01)
        self.put(name, data)
        return True


class Overwrites(MemoryStorage):
    def put_new(self, name, data):
        self.put(name, data)
        return True


class ListsByText(MemoryStorage):
    """Takes a prefix for the beginning of a name."""

    def list(self, prefix):
        return iter([item for item in super().list("") if item[0].startswith(prefix)])


class GoesAnywhere(MemoryStorage):
    """Believes names."""

    def put(self, name, data):
        self._blobs[name] = bytes(data)


class DeletesFolders(MemoryStorage):
    def delete(self, names):
        for name in names:
            folder = name.rpartition("/")[0]
            super().delete([other for other, _ in self.list("") if other.startswith(f"{folder}/") or other == name])


class MissesTheAbsent(MemoryStorage):
    def open(self, name):
        return super().open(name) if name in dict(self.list("")) or not name or ".." in name else self._nothing(name)

    def _nothing(self, name):
        raise KeyError(name)


class HoldsOnToBuffers(MemoryStorage):
    """Writes when it is convenient, from memory that is the caller's again."""

    def create(self, name, size_hint_bytes):
        upload = super().create(name, size_hint_bytes)
        later, write_at, commit = [], upload.write_at, upload.commit
        upload.write_at = lambda offset, data: later.append((offset, data))

        def write_all(size_bytes):
            for offset, data in later:
                write_at(offset, data)
            commit(size_bytes)

        upload.commit = write_all
        return upload


class GluesLines(MemoryStorage):
    """Appends to whatever a crash has left."""

    def append_line(self, name, line):
        there = name in dict(self.list(""))
        self.put(name, (bytes(self._blobs[name]) if there else b"") + line)


class KeepsTheLastLine(MemoryStorage):
    def append_line(self, name, line):
        self.put(name, line)


FAULTS = {
    GluesLines: "test_appended_lines_stay_whole",
    KeepsTheLastLine: "test_appended_lines_stay_whole",
    SilentlyShort: "test_reading_past_the_end_is_an_error",
    PublishesOnClose: "test_an_abandoned_upload_leaves_nothing",
    KeepsThePadding: "test_a_blob_of_any_size_comes_back",
    LooksThenLeaps: "test_put_new_has_one_winner_among_threads",
    Overwrites: "test_put_new_takes_a_name_once",
    ListsByText: "test_list_knows_names_and_sizes_below_a_folder",
    GoesAnywhere: "test_names_that_leave_the_root_are_refused",
    DeletesFolders: "test_delete_removes_what_it_was_given",
    MissesTheAbsent: "test_what_is_absent_cannot_be_opened",
    HoldsOnToBuffers: "test_a_written_buffer_is_the_callers_again",
}


@pytest.mark.parametrize("storage", FAULTS, ids=lambda storage: storage.__name__)
def test_a_broken_promise_is_noticed(storage):
    with pytest.raises((AssertionError, KeyError)):
        getattr(StorageContract(), FAULTS[storage])(storage())
    getattr(StorageContract(), FAULTS[storage])(MemoryStorage())
