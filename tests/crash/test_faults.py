"""The storage that fails as it is told to: every fault it knows does what it says, to the call it names and to no other."""

from __future__ import annotations

import errno
import threading

import pytest

from keepstep.check.contract import StorageContract
from keepstep.check.faults import KINDS, OPERATIONS, Fault, FaultyStorage
from keepstep.errors import CorruptError, StorageError, UsageError
from keepstep.storage.base import read_blob
from keepstep.storage.local import LocalStorage
from keepstep.storage.memory import MemoryStorage

DATA = bytes(range(100))
LINE = b"a line\n"


class TestWithoutAPlan(StorageContract):
    @pytest.fixture
    def storage(self):
        return FaultyStorage(MemoryStorage())


class TestWithAPlanForOthers(StorageContract):
    """Also a plan that keeps account of every change does no harm to calls that it does not name."""

    @pytest.fixture
    def storage(self, tmp_path):
        plan = [Fault("list", "stale", name="elsewhere"), Fault("*", nth=10_000_000)]
        return FaultyStorage(LocalStorage(tmp_path), plan)


def written(storage, name="a/new", data=DATA):
    with storage.create(name, len(data)) as upload:
        upload.write_at(0, memoryview(data))
        upload.commit(len(data))


def read(storage, name="a/x"):
    return read_blob(storage, name, 1 << 20)


CALLS = {
    "create": written,
    "write_at": written,
    "commit": written,
    "put": lambda storage: storage.put("a/new", DATA),
    "put_new": lambda storage: storage.put_new("a/new", DATA),
    "append_line": lambda storage: storage.append_line("a/new", LINE),
    "delete": lambda storage: storage.delete(["a/x", "a/y"]),
    "open": read,
    "read_into": read,
    "list": lambda storage: list(storage.list("a")),
    "folders": lambda storage: storage.folders(),
}
READS = {"open", "read_into", "list", "folders"}


@pytest.fixture(params=["memory", "local"])
def inner(request, tmp_path):
    storage = MemoryStorage() if request.param == "memory" else LocalStorage(tmp_path / "root")
    storage.put("a/x", b"x" * 50)
    storage.put("a/y", b"y")
    return storage


def content(storage):
    return {name: read(storage, name) for name, _ in storage.list("")}


def after(operation, before):
    """What is there when the call was done."""
    if operation in READS:
        return before
    return {} if operation == "delete" else {**before, "a/new": LINE if operation == "append_line" else DATA}


def told(operation, storage):
    with pytest.raises(StorageError) as caught:
        CALLS[operation](storage)
    return caught.value


@pytest.mark.parametrize("operation", sorted(OPERATIONS))
def test_an_error_comes_instead_of_the_call_with_its_errno_and_name(operation, inner):
    before = content(inner)
    for code in (errno.EIO, errno.ENOSPC, errno.EINTR, errno.ETIMEDOUT, errno.EACCES):
        storage = FaultyStorage(inner, [Fault(operation, code=code)])
        error = told(operation, storage)
        assert (error.errno, error.operation) == (code, operation)
        assert content(inner) == before
        assert [(fired.operation, fired.fault.code) for fired in storage.fired] == [(operation, code)]
    CALLS[operation](storage)
    assert content(inner) == after(operation, before)


@pytest.mark.parametrize("operation", sorted(OPERATIONS))
def test_a_late_error_comes_when_all_was_done(operation, inner):
    before = content(inner)
    told(operation, FaultyStorage(inner, [Fault(operation, "late")]))
    # (Of a blob whose upload was given up, nothing is left.)
    assert content(inner) == (before if operation in ("create", "write_at") else after(operation, before))


@pytest.mark.parametrize("operation", sorted(OPERATIONS))
def test_a_blocked_call_waits_to_be_released(operation, inner):
    before = content(inner)
    storage = FaultyStorage(inner, [Fault(operation, "block")])
    thread = threading.Thread(target=CALLS[operation], args=(storage,))
    thread.start()
    assert storage.wait_blocked(30)
    assert thread.is_alive()
    storage.release()
    thread.join(30)
    assert not thread.is_alive()
    assert content(inner) == after(operation, before)


def test_a_slow_call_takes_its_time_and_is_done(inner):
    storage = FaultyStorage(inner, [Fault("put", "slow", wait_s=0.001)])
    storage.put("a/new", DATA)
    assert read(inner, "a/new") == DATA
    assert len(storage.fired) == 1


def test_half_of_it(inner):
    storage = FaultyStorage(inner, [Fault(operation, "short") for operation in KINDS["short"]])
    storage.inner.put("a/z", b"z")
    told("write_at", storage)
    with pytest.raises(CorruptError, match="a/x ends at byte 25; 50 expected"):
        read(storage)
    told("append_line", storage)
    assert read(inner, "a/new") == LINE[:3]
    told("delete", storage)
    assert set(content(inner)) == {"a/y", "a/z", "a/new"}


def test_one_bit_is_another_one(inner):
    for operation in sorted(KINDS["flip"]):
        inner.delete(["a/new"])
        storage = FaultyStorage(inner, [Fault(operation, "flip", at=3, bit=7)])
        if operation == "read_into":
            assert read(storage) == b"xxx\xf8" + b"x" * 46
            assert read(storage) == b"x" * 50
        else:
            CALLS[operation](storage)
            right = LINE if operation == "append_line" else DATA
            wrong = [(a, b) for a, b in zip(read(inner, "a/new"), right, strict=True) if a != b]
            assert wrong == [(right[3] + 128, right[3])], operation


def test_the_end_is_missing(inner):
    for operation in ("commit", "put", "put_new"):
        inner.delete(["a/new"])
        CALLS[operation](FaultyStorage(inner, [Fault(operation, "cut", missing_bytes=7)]))
        assert read(inner, "a/new") == DATA[:-7]
    storage = FaultyStorage(inner, [Fault("open", "cut", missing_bytes=7)])
    assert read(storage) == b"x" * 43
    assert read(storage) == b"x" * 50


def test_a_listing_of_some_changes_ago(inner):
    plan = [Fault(operation, "stale", times=None, ago=2) for operation in ("list", "folders", "open")]
    storage = FaultyStorage(inner, plan)
    assert dict(storage.list("")) == {"a/x": 50, "a/y": 1}
    storage.put("b/1", b"1")
    storage.put("a/x", b"longer" * 10)
    assert dict(storage.list("")) == {"a/x": 50, "a/y": 1}
    assert storage.folders() == ["a"]
    with pytest.raises(StorageError) as caught:
        read(storage, "b/1")
    assert caught.value.errno == errno.ENOENT
    storage.delete(["a/y"])
    assert dict(storage.list("")) == {"a/x": 50, "a/y": 1, "b/1": 1}
    assert dict(storage.list("b")) == {"b/1": 1}
    written(storage)
    assert dict(storage.list("")) == {"a/x": 60, "a/y": 1, "b/1": 1}
    assert dict(storage.list("a")) == {"a/x": 60, "a/y": 1}
    assert read(storage, "b/1") == b"1"


def test_what_is_lost_was_never_done(inner):
    before = content(inner)
    for operation in sorted(KINDS["lost"] - {"write_at"}):
        CALLS[operation](FaultyStorage(inner, [Fault(operation, "lost")]))
        assert content(inner) == before, operation
    CALLS["write_at"](FaultyStorage(inner, [Fault("write_at", "lost")]))
    assert read(inner, "a/new") != DATA


def test_what_was_forgotten_is_there_until_a_crash(inner):
    before = content(inner)
    for operation in sorted(KINDS["forgotten"]):
        storage = FaultyStorage(inner, [Fault(operation, "forgotten", times=None)])
        CALLS[operation](storage)
        assert content(inner) != before, operation
        storage.crash()
        storage.crash()
        assert content(inner) == before, operation
    storage = FaultyStorage(inner, [Fault("put", "forgotten", nth=2)])
    for data in (b"1", b"2", b"3"):
        storage.put("a/x", data)
    assert read(storage) == b"3"
    storage.crash()
    assert read(storage) == b"1"


def test_calls_are_counted_by_operation_and_name(inner):
    storage = FaultyStorage(inner, [Fault("put", nth=2, times=2, name="b/"), Fault("*", nth=6, times=None)])
    outcomes = []
    for name in ("b/1", "a/1", "b/2", "b/3", "b/4", "a/2", "a/3"):
        try:
            storage.put(name, b"")
        except StorageError:
            outcomes.append(name)
    assert outcomes == ["b/2", "b/3", "a/2", "a/3"]
    assert storage.calls[:2] == [("put", "b/1"), ("put", "a/1")]
    assert [fired.name for fired in storage.fired] == outcomes


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"operation": "rename"}, "no operation 'rename'; there are append_line, commit, create"),
        ({"operation": "list", "kind": "flip"}, "'list' cannot be 'flip'; it can be block, error, late, slow, stale"),
        ({"operation": "*", "kind": "short"}, r"'\*' cannot be 'short'; it can be block, error, late, slow"),
        ({"operation": "put", "nth": 0}, "count from 1"),
        ({"operation": "put", "kind": "flip", "bit": 8}, "bit from 0 to 7"),
    ],
)
def test_a_fault_that_means_nothing_is_refused(values, text):
    with pytest.raises(UsageError, match=text):
        Fault(**values)
