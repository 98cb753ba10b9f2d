"""What any storage must do, as tests that its author runs.

Subclass ``StorageContract`` in a pytest file and give it a fixture ``storage`` that returns an empty storage:

    class TestMyStorage(StorageContract):
        @pytest.fixture
        def storage(self, tmp_path):
            return MyStorage(tmp_path)

Nothing here imports pytest: the methods are plain functions of a storage. They use ``assert``, which pytest explains; to
see the values of a failed one, call ``pytest.register_assert_rewrite("keepstep.check.contract")`` in your conftest.
"""

from __future__ import annotations

import errno
import threading

from keepstep.check.looking import Stop, content, expect, is_absent, listed, pattern, raised, together
from keepstep.errors import CorruptError, StorageError, UsageError
from keepstep.storage.base import Storage

__all__ = ["StorageContract"]

PAGE = 4096
SIZES = (0, 1, 2, 511, 512, 4095, 4096, 4097, 8192, 65_535, 65_536, 12 * PAGE, (1 << 20) + 1, (5 << 20) + 17)
THREADS = 8
OUTSIDE = (
    "", "/", "/x", "..", "../x", "a/..", "a/../x", "a/../../x", ".", "./x", "a/./x", "a//x", "a/", "a\\x", "..\\x", "a\0x",
)  # fmt: skip


class StorageContract:
    """One method for each promise of ``keepstep.storage.base``; ``storage`` is empty at the start of every one."""

    # --- whole blobs -------------------------------------------------------------------------------------------------

    def test_a_blob_of_any_size_comes_back(self, storage: Storage) -> None:
        """Written in aligned chunks with a padded tail, as a save does; cut to the true size by ``commit``."""
        for size in SIZES:
            name = f"blobs/{size}"
            data = pattern(size)
            padded = memoryview(data.ljust(-(-size // PAGE) * PAGE, b"\xff"))
            with storage.create(name, size) as upload:
                for start in range(0, len(padded), 1 << 20):
                    upload.write_at(start, padded[start : start + (1 << 20)])
                upload.commit(size)
            expect(content(storage, name), data)

    def test_the_order_of_writes_does_not_matter(self, storage: Storage) -> None:
        """The header of a file is written last, in front of everything else, and over what was there."""
        data = pattern(5 * PAGE)
        with storage.create("a/late-header", len(data)) as upload:
            upload.write_at(0, memoryview(bytes(PAGE)))
            for page in (4, 2, 3, 1, 0):
                upload.write_at(page * PAGE, memoryview(data)[page * PAGE : (page + 1) * PAGE])
            upload.commit(len(data))
        expect(content(storage, "a/late-header"), data)

    def test_any_alignment_is_written_and_read(self, storage: Storage) -> None:
        """Buffers that are aligned in address, offset and length, and in any subset of the three."""
        data = pattern(4 * PAGE)
        cases = [(at, start, stop) for at in (0, 1, 512) for start in (0, 1, PAGE) for stop in (4 * PAGE, 3 * PAGE + 5)]
        for shift, start, stop in cases:
            name = f"aligned/{shift}-{start}-{stop}"
            held = memoryview(bytearray(shift) + data)[shift:]
            with storage.create(name, stop) as upload:
                upload.write_at(0, held[:start])
                upload.write_at(start, held[start:stop])
                upload.commit(stop)
            target = memoryview(bytearray(shift + stop))[shift:]
            with storage.open(name) as blob:
                blob.read_into(start, target[start:])
                blob.read_into(0, target[:start])
            expect(bytes(target), data[:stop])

    def test_threads_write_parts_of_one_blob(self, storage: Storage) -> None:
        """Several at once, aligned and not; all of it is there after ``commit``."""
        data = pattern(64 * PAGE + 100)
        bounds = [0, 1, PAGE - 1, 3 * PAGE, 10 * PAGE, 10 * PAGE + 7, 32 * PAGE, 33 * PAGE, len(data)]
        with storage.create("a/parallel", len(data)) as upload:
            together(
                lambda i: upload.write_at(bounds[i], memoryview(data)[bounds[i] : bounds[i + 1]]),
                count=len(bounds) - 1,
            )
            upload.commit(len(data))
        expect(content(storage, "a/parallel"), data)

    def test_a_written_buffer_is_the_callers_again(self, storage: Storage) -> None:
        """What ``write_at`` was given may be filled anew as soon as it returns."""
        buffer = bytearray(2 * PAGE)
        with storage.create("a/reused", 4 * PAGE) as upload:
            for page in range(2):
                buffer[:] = bytes([page + 1]) * len(buffer)
                upload.write_at(page * len(buffer), memoryview(buffer))
            buffer[:] = bytes(len(buffer))
            upload.commit(2 * len(buffer))
        expect(content(storage, "a/reused"), b"\1" * len(buffer) + b"\2" * len(buffer))

    # --- what was not committed --------------------------------------------------------------------------------------

    def test_a_blob_is_absent_until_it_is_committed(self, storage: Storage) -> None:
        """Whatever was written of it, nobody sees it under its name."""
        with storage.create("a/growing", PAGE) as upload:
            assert is_absent(storage, "a/growing")
            upload.write_at(0, memoryview(pattern(PAGE)))
            assert is_absent(storage, "a/growing")
            upload.commit(PAGE)
            expect(content(storage, "a/growing"), pattern(PAGE))

    def test_an_abandoned_upload_leaves_nothing(self, storage: Storage) -> None:
        """Neither under the name nor elsewhere; and the name can be used again."""
        for written in (0, 1, PAGE, 3 * PAGE + 1):
            error = raised(_abandon, storage, "a/abandoned", written)
            assert isinstance(error, Stop)
            assert is_absent(storage, "a/abandoned")
            assert list(storage.list("")) == []
        with storage.create("a/abandoned", 1) as upload:
            upload.write_at(0, memoryview(b"x"))
            upload.commit(1)
        assert content(storage, "a/abandoned") == b"x"

    def test_uploads_close_more_than_once(self, storage: Storage) -> None:
        """With and without a commit; a committed blob stays."""
        dropped = storage.create("a/dropped", 1)
        dropped.close()
        dropped.close()
        assert list(storage.list("")) == []
        kept = storage.create("a/kept", 1)
        kept.write_at(0, memoryview(b"x"))
        kept.commit(1)
        kept.close()
        kept.close()
        assert listed(storage) == {"a/kept": 1}

    # --- small blobs -------------------------------------------------------------------------------------------------

    def test_put_replaces(self, storage: Storage) -> None:
        """With shorter, longer and empty contents."""
        for data in (b"first", b"", b"a longer second one" * 1000, b"3"):
            storage.put("a/small", data)
            expect(content(storage, "a/small"), data)
            assert listed(storage) == {"a/small": len(data)}

    def test_readers_of_a_replaced_blob_see_one_or_the_other(self, storage: Storage) -> None:
        """Never a mixture, never a short one, never none."""
        values = [b"a" * 9000, b"b" * 4096, b"c" * 20_000]
        storage.put("a/hot", values[0])
        done = threading.Event()

        def work(i: int) -> None:
            if i == 0:
                try:
                    for round_ in range(12):
                        storage.put("a/hot", values[round_ % 3])
                finally:
                    done.set()
                return
            while not done.is_set():
                assert content(storage, "a/hot") in set(values)

        together(work, count=4)

    def test_put_new_takes_a_name_once(self, storage: Storage) -> None:
        """The second caller is told, and changes nothing; a deleted name is free again."""
        assert storage.put_new("a/once", b"first") is True
        assert storage.put_new("a/once", b"other") is False
        assert content(storage, "a/once") == b"first"
        assert listed(storage) == {"a/once": 5}
        storage.delete(["a/once"])
        assert storage.put_new("a/once", b"") is True
        assert storage.put_new("a/once", b"") is False
        storage.put("a/put", b"x")
        assert storage.put_new("a/put", b"y") is False
        assert content(storage, "a/put") == b"x"

    def test_put_new_has_one_winner_among_threads(self, storage: Storage) -> None:
        """All start together; exactly one gets True, and the blob is that one's."""
        for round_ in range(5):
            name = f"a/race-{round_}"
            won: list[int] = []

            def race(i: int, name: str = name, won: list[int] = won) -> None:
                if storage.put_new(name, f"caller {i}".encode() * 500):
                    won.append(i)

            together(race, count=THREADS)
            assert len(won) == 1, f"{len(won)} winners"
            expect(content(storage, name), f"caller {won[0]}".encode() * 500)
        assert len(listed(storage)) == 5

    def test_put_over_replaces_what_is_expected_and_nothing_else(self, storage: Storage) -> None:
        """Longer and shorter contents, empty ones too; whoever expects something else changes nothing."""
        assert storage.put_over("a/over", b"1", b"") is False
        assert is_absent(storage, "a/over")
        storage.put("a/over", b"first")
        for wrong in (b"", b"firs", b"other", b"first and more"):
            assert storage.put_over("a/over", b"new", wrong) is False
        assert content(storage, "a/over") == b"first"
        before = b"first"
        for data in (b"a longer second one" * 500, b"", b"3"):
            assert storage.put_over("a/over", data, before) is True
            expect(content(storage, "a/over"), data)
            before = data
        assert listed(storage) == {"a/over": 1}

    def test_put_over_has_one_winner_among_threads(self, storage: Storage) -> None:
        """Of those that expect the same; where the storage does not say that it swaps, one at least, and no mixture."""
        for round_ in range(3):
            storage.put("a/raced", b"before")
            won: list[int] = []

            def race(i: int, won: list[int] = won) -> None:
                if storage.put_over("a/raced", f"caller {i}".encode() * 100, b"before"):
                    won.append(i)

            together(race, count=THREADS)
            assert won if not storage.swaps else len(won) == 1, f"round {round_}: {len(won)} winners"
            assert content(storage, "a/raced") in {f"caller {i}".encode() * 100 for i in won}

    def test_appended_lines_stay_whole(self, storage: Storage) -> None:
        """Whoever reads meanwhile sees the first few of them; what a crash has cut off spoils no other line."""
        lines = [f"{i} {'x' * (i * 577 % 5000)}\n".encode() for i in range(24)]
        done = threading.Event()

        def work(i: int) -> None:
            if i == 0:
                try:
                    for line in lines:
                        storage.append_line("a/lines", line)
                finally:
                    done.set()
                return
            while not done.is_set():
                seen = [] if is_absent(storage, "a/lines") else content(storage, "a/lines").splitlines(keepends=True)
                whole = [line for line in seen if line.endswith(b"\n")]
                assert whole == lines[: len(whole)]
                assert len(seen) - len(whole) <= 1

        together(work, count=4)
        expect(content(storage, "a/lines"), b"".join(lines))
        storage.put("a/cut", b"first\nsec")
        storage.append_line("a/cut", b"third\n")
        expect(content(storage, "a/cut"), b"first\nsec\nthird\n")

    # --- names -------------------------------------------------------------------------------------------------------

    def test_list_knows_names_and_sizes_below_a_folder(self, storage: Storage) -> None:
        """A prefix is a folder, not the beginning of a name; what is not there has nothing below it."""
        sizes = {"top": 3, "a/x": 0, "a/b/y": 5000, "a/b/c/z": 1, "ab/x": 2, "a.b/x": 4}
        for name, size in sizes.items():
            storage.put(name, bytes(size))
        assert listed(storage) == sizes
        assert listed(storage, "a") == {name: size for name, size in sizes.items() if name.startswith("a/")}
        assert listed(storage, "a/b") == {"a/b/y": 5000, "a/b/c/z": 1}
        assert listed(storage, "a/b/c") == {"a/b/c/z": 1}
        for nothing in ("b", "a/c", "t", "top/x"):
            assert listed(storage, nothing) == {}

    def test_an_empty_storage_has_nothing(self, storage: Storage) -> None:
        """Before the first write, too, where the root may not be there yet."""
        assert list(storage.list("")) == []
        assert list(storage.list("a")) == []
        assert list(storage.folders()) == []
        storage.delete(["a/x", "y"])
        assert is_absent(storage, "a/x")

    def test_folders_are_those_directly_below_the_root(self, storage: Storage) -> None:
        """Each once; blobs at the root are none, nor are folders of folders."""
        for name in ("top", "a/x", "a/y", "b/c/d/x", "step-00000001/.metadata"):
            storage.put(name, b"x")
        assert sorted(storage.folders()) == ["a", "b", "step-00000001"]

    def test_names_of_every_kind(self, storage: Storage) -> None:
        """Dots, blanks, other scripts, and what a shell or a URL would take for something else."""
        names = (
            ".metadata", "a/..b", "a/b..", "a/...", "a b/c d", "ü/日本", "a%2Fb", "a?b#c&d", "-rf", "~", "$x", "a:b",
        )  # fmt: skip
        for name in names:
            storage.put(name, name.encode())
        assert set(listed(storage)) == set(names)
        for name in names:
            assert content(storage, name) == name.encode()

    def test_delete_removes_what_it_was_given(self, storage: Storage) -> None:
        """And nothing else; names already gone are no error; what was deleted can be written again."""
        for name in ("a/x", "a/y", "b/x", "c"):
            storage.put(name, b"x")
        storage.delete([])
        storage.delete(["a/x", "a/absent", "absent/x", "c"])
        assert listed(storage) == {"a/y": 1, "b/x": 1}
        assert is_absent(storage, "a/x")
        storage.delete(["a/x", "a/y", "b/x"])
        assert list(storage.list("")) == []
        storage.put("a/x", b"new")
        assert content(storage, "a/x") == b"new"

    def test_names_that_leave_the_root_are_refused(self, storage: Storage) -> None:
        """By every method, before anything is touched."""
        storage.put("a/x", b"x")
        for name in OUTSIDE:
            assert isinstance(raised(storage.create, name, 1), UsageError), repr(name)
            assert isinstance(raised(storage.open, name), UsageError), repr(name)
            assert isinstance(raised(storage.put, name, b"evil"), UsageError), repr(name)
            assert isinstance(raised(storage.put_new, name, b"evil"), UsageError), repr(name)
            assert isinstance(raised(storage.put_over, name, b"evil", b"x"), UsageError), repr(name)
            assert isinstance(raised(storage.append_line, name, b"evil\n"), UsageError), repr(name)
            assert isinstance(raised(storage.delete, [name]), UsageError), repr(name)
        for name in ("..", "../x", "a/..", "a/../..", "/x", "a\0x"):
            assert isinstance(raised(listed, storage, name), UsageError), repr(name)
        assert listed(storage) == {"a/x": 1}

    def test_the_url_stays_the_same(self, storage: Storage) -> None:
        """It is what ranks compare and what messages show."""
        before = storage.url
        assert before
        storage.put("a/x", b"x")
        assert storage.url == before

    # --- reading -----------------------------------------------------------------------------------------------------

    def test_what_is_absent_cannot_be_opened(self, storage: Storage) -> None:
        """StorageError with ENOENT, whether the folder is there or not."""
        storage.put("a/x", b"x")
        for name in ("a/y", "b", "b/c/d", "a/x/y"):
            error = raised(storage.open, name)
            assert isinstance(error, StorageError), repr(error)
            assert error.errno == errno.ENOENT, repr(error)

    def test_reading_past_the_end_is_an_error(self, storage: Storage) -> None:
        """Never a short read, never bytes that are not there; the end itself can be read up to."""
        data = pattern(PAGE + 10)
        storage.put("a/x", data)
        with storage.open("a/x") as blob:
            assert blob.size_bytes == len(data)
            for start, length in ((0, len(data) + 1), (PAGE, 11), (len(data), 1), (1 << 40, 1)):
                target = memoryview(bytearray(length))
                error = raised(blob.read_into, start, target)
                assert isinstance(error, CorruptError), f"{length} bytes at {start}: {error!r}"
            last = bytearray(10)
            blob.read_into(PAGE, memoryview(last))
            expect(bytes(last), data[PAGE:])
            blob.read_into(len(data), memoryview(bytearray(0)))

    def test_threads_read_parts_of_one_blob(self, storage: Storage) -> None:
        """Several at once from one open blob; every part is right."""
        data = pattern(32 * PAGE + 5)
        storage.put("a/x", data)
        step = len(data) // THREADS

        with storage.open("a/x") as blob:

            def work(i: int) -> None:
                for start in range(i, i + 3 * step, step // 2):
                    target = bytearray(min(step, len(data) - start))
                    blob.read_into(start, memoryview(target))
                    expect(bytes(target), data[start : start + len(target)])

            together(work, count=THREADS)
            blob.close()
            blob.close()


def _abandon(storage: Storage, name: str, written: int) -> None:
    with storage.create(name, written) as upload:
        if written:
            upload.write_at(0, memoryview(pattern(written)))
        raise Stop
