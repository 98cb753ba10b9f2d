"""Object stores over a socket: what a bad network, a strict store and a wrong key do to blobs."""

from __future__ import annotations

import errno
import io
import os
import secrets
import threading

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

import keepstep as ks
from keepstep.errors import StorageError, UsageError
from keepstep.storage.base import read_blob
from keepstep.storage.parts import PartLimits
from keepstep.storage.remote import RemoteStorage
from keepstep.storage.retry import Patience
from tests.helpers.agents import wait_until
from tests.helpers.proxy import CUT, DROP, LOST, RESET, SHORT, STALL, at_random, proxy_before
from tests.helpers.servers import KEY, SECRET

QUICK = Patience(tries=8, first_wait_s=0.005, longest_wait_s=0.02, request_s=20)
PAGE = 4096
SMALL_PARTS = PartLimits(usual_bytes=4 * PAGE, least_bytes=PAGE)


@pytest.fixture
def proxy(moto_of_small_parts):
    with proxy_before(moto_of_small_parts.address) as one:
        yield one


@pytest.fixture
def bucket(moto_of_small_parts):
    return moto_of_small_parts.make_bucket("faults")


@pytest.fixture
def storage(proxy, moto_of_small_parts, bucket):
    """Through the proxy, in parts of four pages."""
    proxy_options = moto_of_small_parts.options(proxy.endpoint)
    return RemoteStorage(
        f"s3://{bucket}/{secrets.token_hex(4)}", options=proxy_options, patience=QUICK, limits=SMALL_PARTS
    )


@pytest.fixture
def uploads(moto_of_small_parts, bucket, storage):
    """Multipart uploads that were begun below the root and neither completed nor aborted."""

    def found() -> list[str]:
        folder = storage.url.rpartition("/")[2]
        listed = moto_of_small_parts.client().list_multipart_uploads(Bucket=bucket).get("Uploads") or []
        return [each["Key"] for each in listed if each["Key"].startswith(folder)]

    return found


def pattern(size: int) -> bytes:
    return (bytes(range(251)) * (size // 251 + 1))[:size]


def write(storage, name, data, step=PAGE):
    with storage.create(name, len(data)) as upload:
        for start in range(0, len(data), step):
            upload.write_at(start, memoryview(data)[start : start + step])
        upload.commit(len(data))


def read(storage, name):
    return read_blob(storage, name, 1 << 30)


def nth(kind, *numbers, method="", part=""):
    """Fails the requests of these numbers among those of a method and a part of the path."""
    seen = []

    def fault(asked):
        if (method and asked.method != method) or part not in asked.path:
            return None
        seen.append(asked)
        return kind if len(seen) - 1 in numbers else None

    return fault


# --- one blob ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", [DROP, LOST, RESET, 500, 503, 429], ids=str)
def test_a_create_that_fails_once_has_one_winner(storage, proxy, kind):
    """Also when the answer was lost after the object was made: the next try finds it, and knows it for its own."""
    assert storage.exclusive
    proxy.fault = nth(kind, 0, 1, method="PUT")
    assert storage.put_new("a/once", b"mine, by its random id") is True
    assert proxy.done[str(kind)] == 2
    assert storage.put_new("a/once", b"somebody else's") is False
    assert storage.put_new("a/once", b"mine, by its random id") is False
    assert read(storage, "a/once") == b"mine, by its random id"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [DROP, RESET, CUT, SHORT, 503], ids=str)
def test_a_body_that_is_cut_is_read_again(storage, proxy, kind):
    data = pattern(700_000)
    write(storage, "a/large", data)
    proxy.fault = nth(kind, 0, 2, 4, method="GET")
    with storage.open("a/large") as blob:
        got = bytearray(len(data))
        for start in range(0, len(data), 100_000):
            blob.read_into(start, memoryview(got)[start : start + 100_000])
    assert bytes(got) == data
    assert proxy.done[str(kind)] == 3


@pytest.mark.slow
def test_a_body_that_is_always_short_is_an_error_and_never_a_value(storage, proxy):
    storage.put("a/x", pattern(400_000))
    blob = storage.open("a/x")
    proxy.fault = lambda asked: SHORT if asked.method == "GET" else None
    with pytest.raises(
        StorageError, match=r"read of 'a/x' failed: .*bytes.* were asked for|read of 'a/x' failed"
    ) as caught:
        blob.read_into(300_000, memoryview(bytearray(30_000)))
    assert caught.value.errno == errno.EIO
    assert "tried 8 times" in str(caught.value)


@pytest.mark.slow
def test_parts_are_sent_again_and_nothing_is_left_of_an_upload_that_fails(storage, proxy, uploads):
    data = pattern(40 * PAGE + 7)
    for kind in (DROP, RESET, 503, 500, 429):
        proxy.fault = nth(kind, 1, 4, method="PUT", part="partNumber")
        write(storage, f"a/{kind}", data)
        assert read(storage, f"a/{kind}") == data
    proxy.fault = lambda asked: (
        (403, b"<Error><Code>AccessDenied</Code></Error>") if "partNumber=3" in asked.path else None
    )
    with pytest.raises(StorageError, match="access was denied"):
        write(storage, "a/denied", data)
    proxy.fault = lambda asked: None
    assert "a/denied" not in dict(storage.list(""))
    assert uploads() == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", [LOST, RESET, CUT], ids=str)
def test_a_completion_whose_answer_is_lost_has_happened(storage, proxy, kind):
    """The store knows nothing of the upload any more, because it is complete: the object is there in its size."""
    data = pattern(9 * PAGE)
    proxy.fault = lambda asked: kind if asked.method == "POST" and "uploadId" in asked.path else None
    write(storage, "a/whole", data)
    proxy.fault = lambda asked: None
    assert read(storage, "a/whole") == data


@pytest.mark.slow
def test_what_was_not_committed_leaves_no_parts_behind(storage, uploads):
    upload = storage.create("a/dropped", 40 * PAGE)
    data = memoryview(pattern(40 * PAGE))
    upload.write_at(0, data)
    wait_until(lambda: uploads() == [f"{storage.url.rpartition('/')[2]}/a/dropped"])
    upload.close()
    assert uploads() == []
    assert list(storage.list("")) == []


@pytest.mark.slow
def test_what_was_sent_is_not_written_again(storage, uploads):
    """Once its part is on its way; and what was announced cannot become less than what was sent."""
    data = memoryview(pattern(12 * PAGE))
    with pytest.raises(StorageError, match=r"byte 0 was sent already"), storage.create("a/x", len(data)) as upload:
        upload.write_at(0, data)
        upload.write_at(0, data[:10])
    with storage.create("a/x", len(data)) as upload:
        upload.write_at(0, data)
        with pytest.raises(StorageError, match=r"49,152 bytes were sent already, more than the 100"):
            upload.commit(100)
    assert list(storage.list("")) == []
    assert uploads() == []


@pytest.mark.slow
def test_parts_may_come_in_any_order(storage):
    """Holes are zeros, and what lies beyond the announced size is cut off."""
    data = pattern(40 * PAGE)
    order = [*range(39, 20, -1), *range(1, 21), 0]
    with storage.create("a/backwards", len(data)) as upload:
        for page in order:
            upload.write_at(page * PAGE, memoryview(data)[page * PAGE : (page + 1) * PAGE])
        upload.commit(len(data))
    assert read(storage, "a/backwards") == data
    with storage.create("a/holes", 20 * PAGE + 10) as upload:
        upload.write_at(9 * PAGE, memoryview(data)[: 12 * PAGE])
        upload.commit(20 * PAGE + 10)
    assert read(storage, "a/holes") == bytes(9 * PAGE) + data[: 11 * PAGE + 10]


@pytest.mark.slow
def test_memory_of_an_upload_is_bounded(storage, proxy):
    """A writer waits while parts are on their way: the store that answers nothing is not fed for ever."""
    gate = threading.Event()
    proxy.fault = lambda asked: gate.wait(20) and None if "partNumber" in asked.path else None
    size = 200 * 4 * PAGE
    page, written = memoryview(pattern(4 * PAGE)), []

    def work():
        with storage.create("a/slow", size) as upload:
            for start in range(0, size, len(page)):
                upload.write_at(start, page)
                written.append(start)
            upload.commit(size)

    thread = threading.Thread(target=work)
    thread.start()
    wait_until(lambda: len(proxy.asked) >= 2)
    before = -1
    while before != len(written):
        before = len(written)
        thread.join(0.15)
    assert before <= 8 + 2 + 3
    gate.set()
    thread.join()
    assert len(read(storage, "a/slow")) == size


@pytest.mark.slow
def test_a_store_that_never_answers_is_given_up(moto_of_small_parts, bucket, proxy):
    patience = Patience(tries=2, first_wait_s=0.01, longest_wait_s=0.01, request_s=0.3)
    options = moto_of_small_parts.options(proxy.endpoint)
    storage = RemoteStorage(f"s3://{bucket}/stalled", options=options, patience=patience)
    proxy.fault = lambda asked: STALL
    for act in (lambda: storage.put("a", b"x"), lambda: storage.open("a"), lambda: list(storage.list(""))):
        with pytest.raises(StorageError, match="tried 2 times") as caught:
            act()
        assert caught.value.errno in (errno.ETIMEDOUT, errno.EIO)
    proxy.fault = lambda asked: None


@pytest.mark.slow
@pytest.mark.case(152)
def test_the_size_of_parts_follows_the_size_of_the_object(moto, proxy):
    """A store with few parts and a least size of each, which it holds to: the size is chosen before the first part goes."""
    bucket = moto.make_bucket("parts")
    limits = PartLimits(most_parts=3, usual_bytes=5 << 20)
    storage = RemoteStorage(f"s3://{bucket}/run", options=moto.options(), limits=limits)
    data = bytes(1 << 20) * 17
    write(storage, "large", data, step=1 << 20)
    assert dict(storage.list("")) == {"large": len(data)}
    assert moto.client().head_object(Bucket=bucket, Key="run/large")["ETag"].endswith('-3"')
    tight = RemoteStorage(
        f"s3://{bucket}/run", options=moto.options(), limits=PartLimits(3, 5 << 20, most_bytes=5 << 20)
    )
    with pytest.raises(
        StorageError, match=r"17,825,792 bytes are more than the store takes.*3 parts of 5,242,880"
    ) as caught:
        tight.create("large", len(data))
    assert caught.value.errno == errno.EFBIG
    with (
        pytest.raises(StorageError, match=r"more than the store takes of one object: 3 parts of 5,242,880 bytes"),
        storage.create("grown", 10) as upload,
    ):
        upload.write_at(15 << 20, memoryview(b"x"))
    assert dict(storage.list("")) == {"large": len(data)}


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "code", "number", "text"),
    [
        (404, "NoSuchBucket", errno.ENODEV, "the bucket does not exist"),
        (403, "AccessDenied", errno.EACCES, "access was denied"),
        (403, "InvalidAccessKeyId", errno.EACCES, "does not know these credentials"),
        (403, "SignatureDoesNotMatch", errno.EACCES, "key or secret is wrong"),
        (400, "ExpiredToken", errno.EACCES, "the credentials have expired"),
        (403, "RequestTimeTooSkewed", errno.EACCES, "the clock of this machine"),
        (400, "AuthorizationHeaderMalformed", errno.EINVAL, "in another region"),
        (301, "PermanentRedirect", errno.EINVAL, "in another region"),
        (400, "EntityTooLarge", errno.EFBIG, "larger than the store takes"),
        (503, "SlowDown", errno.EAGAIN, r"the store answered 503 SlowDown \(tried 8 times"),
        (500, "InternalError", errno.EIO, "the store answered 500 InternalError"),
        (418, "Teapot", errno.EIO, "418"),
    ],
)
@pytest.mark.parametrize("library", ["obstore", "fsspec"])
def test_errors_say_what_is_wrong(moto_of_small_parts, proxy, library, status, code, number, text):
    if (library, status) == ("fsspec", 301):
        pytest.skip("the library follows the redirect by itself, to where the store says that the bucket is")
    options = moto_of_small_parts.options(proxy.endpoint, library)
    storage = RemoteStorage("s3://faults/wrong", options=options, library=library, patience=QUICK)
    body = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>of {KEY}</Message></Error>'
    proxy.fault = lambda asked: (status, body.encode())
    acts = [lambda: storage.put("a/x", b"x"), lambda: list(storage.list(""))]
    acts += [lambda: storage.open("a/x")] if library == "obstore" else []
    for act in acts:
        with pytest.raises(StorageError, match=text) as caught:
            act()
        assert caught.value.errno == number
        assert "s3://faults/wrong" in str(caught.value)
        assert SECRET not in str(caught.value)
        assert KEY not in str(caught.value)


@pytest.mark.slow
def test_a_bucket_that_is_not_there_is_no_empty_run(moto):
    storage = RemoteStorage("s3://no-such-bucket/run", options=moto.options())
    for act in (
        lambda: list(storage.list("")),
        storage.folders,
        lambda: storage.open("x"),
        lambda: storage.put("x", b""),
    ):
        with pytest.raises(StorageError, match="the bucket does not exist") as caught:
            act()
        assert caught.value.errno == errno.ENODEV
    with pytest.raises(StorageError, match="the bucket does not exist"):
        ks.open(storage)


def test_urls_that_cannot_be_used():
    for url, text in (
        (f"s3://{KEY}:{SECRET}@bucket/run", "credentials do not belong in a URL"),
        (f"s3://bucket/run?secret={SECRET}", "options do not belong in a URL"),
        ("s3:///run", "names no bucket"),
        ("s3://bucket/../run", "an empty segment, '.' or '..'"),
        ("nonsense://bucket/run", "nonsense"),
    ):
        with pytest.raises(UsageError, match=text) as caught:
            ks.save(url, {"x": 1})
        assert SECRET not in str(caught.value)
    with pytest.raises(UsageError, match="is not valid for store"):
        RemoteStorage("s3://bucket/run", options={"nonsense": 1})
    with pytest.raises(UsageError, match="library='boto'"):
        RemoteStorage("s3://bucket/run", library="boto")


@pytest.mark.slow
def test_a_forked_child_is_told_and_does_not_wait_for_ever(storage, moto):
    """The threads that do the work are the parent's: the child is refused, with its old storage and with a new one."""
    storage.put("a", b"x")
    child = os.fork()
    if child == 0:
        refused = 0
        for act in (lambda: storage.put("b", b"x"), lambda: RemoteStorage("s3://faults/x", options=moto.options())):
            try:
                act()
            except UsageError as err:
                refused += "forked" in str(err)
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert dict(storage.list("")) == {"a": 1}


@pytest.mark.slow
@pytest.mark.case(154)
def test_an_object_may_be_larger_than_a_request(moto_of_small_parts, bucket, proxy):
    """A store that takes no more than so much in one request: a save of many times that is one object, in parts."""
    limit = 64 * PAGE
    proxy.fault = lambda asked: (413, b"<Error><Code>EntityTooLarge</Code></Error>") if asked.length > limit else None
    options = moto_of_small_parts.options(proxy.endpoint)
    root = f"s3://{bucket}/{secrets.token_hex(4)}"
    small = RemoteStorage(root, options=options, patience=QUICK, limits=PartLimits(usual_bytes=limit, least_bytes=PAGE))
    state = {"model": {"w": torch.arange(20 * limit // 4, dtype=torch.int32)}, "n": 5}
    with pytest.raises(StorageError, match="larger than the store takes in one request"):
        ks.save(RemoteStorage(f"{root}/whole", options=options, patience=QUICK), state)
    proxy.asked.clear()
    ks.save(small, state)
    target = {"model": {"w": torch.zeros_like(state["model"]["w"])}, "n": 0}
    ks.load(small, target)
    assert torch.equal(target["model"]["w"], state["model"]["w"])
    assert max(dict(small.list("")).values()) > 20 * limit
    assert max(asked.length for asked in proxy.asked) <= limit


class NoDescriptor(LocalFileSystem):
    """A file system whose files look like files and have no descriptor."""

    protocol = "nodescriptor"

    def _open(self, path, mode="rb", **kwargs):
        return Wrapped(super()._open(path, mode=mode, **kwargs))


class Wrapped:
    def __init__(self, file):
        self.file = file

    def __getattr__(self, name):
        if name in ("fsync", "commit", "discard"):
            raise AttributeError(name)
        return getattr(self.file, name)

    def fileno(self):
        raise io.UnsupportedOperation("fileno")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()


@pytest.mark.slow
@pytest.mark.case(148)
def test_files_without_a_descriptor_are_written_and_those_on_disk_are_synced(tmp_path, monkeypatch):
    fsspec.register_implementation("nodescriptor", NoDescriptor, clobber=True)
    state, synced, fsync = {"w": torch.arange(1000), "n": 3}, [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(descriptor) or fsync(descriptor))
    ks.save(f"nodescriptor://{tmp_path}/remote", state)
    assert not synced
    ks.save(tmp_path / "local", state)
    assert len(synced) >= 3
    for place in (f"nodescriptor://{tmp_path}/remote", tmp_path / "local"):
        target = {"w": torch.zeros(1000, dtype=torch.int64), "n": 0}
        ks.load(place, target)
        assert torch.equal(target["w"], state["w"])
        assert target["n"] == 3


@pytest.mark.slow
def test_memory_is_the_process_whoever_opens_it():
    """Two storages of one URL see the same, and of many callers of both exactly one takes a name."""
    url = f"memory://{secrets.token_hex(4)}/run"
    storages = [RemoteStorage(url), RemoteStorage(url)]
    for round_ in range(50):
        start, won = threading.Barrier(4), []

        def work(i, round_=round_, start=start, won=won):
            start.wait()
            if storages[i % 2].put_new(f"a/{round_}", f"{i}".encode()):
                won.append(i)
            assert dict(storages[i % 2].list("a"))[f"a/{round_}"] == 1

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert read(storages[0], f"a/{round_}") == str(won[0]).encode()


def test_a_file_url_is_the_disk(tmp_path):
    ks.save(f"file://{tmp_path}/step", {"x": 1})
    target = {"x": 0}
    ks.load(tmp_path / "step", target)
    assert target == {"x": 1}


@pytest.mark.slow
@pytest.mark.case(153)
def test_uploads_that_are_not_begun_and_requests_that_are_too_large(moto_of_small_parts, bucket, proxy, uploads):
    """Every fifth beginning of an upload gets an empty reply, and no request with more than a part is ever answered."""
    begun = []

    def fault(asked):
        if asked.method == "POST" and "uploads" in asked.path:
            begun.append(asked)
            return (200, b"") if len(begun) % 5 == 1 else None
        return STALL if asked.length > 5 * PAGE else None

    options = moto_of_small_parts.options(proxy.endpoint)
    patience = Patience(tries=4, first_wait_s=0.005, longest_wait_s=0.02, request_s=2)
    storage = RemoteStorage(f"s3://{bucket}/stalls", options=options, patience=patience, limits=SMALL_PARTS)
    proxy.fault = fault
    for i in range(6):
        write(storage, f"a/{i}", pattern(20 * PAGE + i))
    assert len(begun) == 6 + 2
    assert all(read(storage, f"a/{i}") == pattern(20 * PAGE + i) for i in range(6))
    proxy.fault = lambda asked: (200, b"") if "uploads" in asked.path else None
    with pytest.raises(StorageError, match=r"upload of 'a/never' failed: s3://faults/stalls: .*\(errno 5\)"):
        write(storage, "a/never", pattern(20 * PAGE))


@pytest.mark.slow
@pytest.mark.parametrize("library", ["obstore", "fsspec"])
def test_a_store_that_fails_at_random_loses_nothing(moto_of_small_parts, bucket, proxy, library):
    options = moto_of_small_parts.options(proxy.endpoint, library)
    url = f"s3://{bucket}/{secrets.token_hex(4)}"
    storage = RemoteStorage(url, options=options, library=library, patience=QUICK, limits=SMALL_PARTS)
    assert storage.exclusive
    proxy.fault = at_random(0.15, seed=6)
    wanted = {}
    for i in range(40):
        data = pattern(i * 997)
        if i % 4:
            assert storage.put_new(f"a/{i}", data + secrets.token_bytes(8)) is True
            data = read(storage, f"a/{i}")
            assert data[:-8] == pattern(i * 997)
        else:
            storage.put(f"a/{i}", data)
        wanted[f"a/{i}"] = data
        assert storage.put_new(f"a/{i}", b"another") is False
    assert {name: read(storage, name) for name, _ in storage.list("a")} == wanted
    storage.delete([*wanted])
    assert list(storage.list("")) == []
    assert sum(proxy.done.values()) - proxy.done["well"] > 15
