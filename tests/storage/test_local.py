"""What is particular to a local disk: direct I/O and what stands in its way, full disks, links, and nothing left over."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
import subprocess

import pytest
import torch

import keepstep as ks
from keepstep.errors import StorageError, UsageError
from keepstep.storage.base import read_blob
from keepstep.storage.local import LocalStorage

PAGE = 4096
MIB = 1 << 20


def aligned(size: int) -> memoryview:
    """Page-aligned memory with a pattern, as an arena has it."""
    memory = mmap.mmap(-1, max(size, 1))
    memory[:] = (bytes(range(251)) * (len(memory) // 251 + 1))[: len(memory)]
    return memoryview(memory)


def write(storage: LocalStorage, name: str, data: memoryview, chunk: int = 2 * MIB) -> None:
    with storage.create(name, len(data)) as upload:
        for start in range(0, len(data), chunk):
            upload.write_at(start, data[start : start + chunk])
        upload.commit(len(data))


def read(storage: LocalStorage, name: str) -> bytes:
    return read_blob(storage, name, 1 << 30)


def files(folder) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def is_direct(descriptor: int) -> bool:
    return bool(os.path.exists(f"/proc/self/fdinfo/{descriptor}") and _flags(descriptor) & os.O_DIRECT)  # noqa: PTH110


def _flags(descriptor: int) -> int:
    import fcntl

    return fcntl.fcntl(descriptor, fcntl.F_GETFL)


# --- writes that do less than they were asked to ---------------------------------------------------------------------


@pytest.mark.case(49)
def test_a_system_call_that_writes_a_part_is_repeated(tmp_path, monkeypatch):
    """At most 1 MiB a call, then at most an odd number of bytes: every byte arrives, whichever way it goes."""
    real = os.pwrite
    calls = []
    for most in (MIB, 300_001):
        monkeypatch.setattr(
            os, "pwrite", lambda fd, data, at, most=most: calls.append(at) or real(fd, memoryview(data)[:most], at)
        )
        storage = LocalStorage(tmp_path / str(most))
        data = aligned(3 * MIB + PAGE)
        write(storage, "a/x", data)
        storage.put("a/small", bytes(data[: 2 * MIB + 1]))
        monkeypatch.undo()
        assert read(storage, "a/x") == data
        assert read(storage, "a/small") == data[: 2 * MIB + 1]
        assert files(storage.root) == ["a/small", "a/x"]
    assert len(calls) > 2 * (3 + 2)


@pytest.mark.case(48, 49)
def test_tensors_of_every_stride_survive_a_storage_that_writes_little_at_a_time(tmp_path, monkeypatch):
    """Through save and load: transposed, strided, expanded and channels-last tensors into contiguous and other targets."""
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, memoryview(data)[:MIB], at))
    base = torch.arange(600_000, dtype=torch.int32)
    state = {
        "transposed": base.reshape(600, 1000).t(),
        "every_second": base[::2],
        "columns": base.reshape(600, 1000)[:, 3:500:7],
        "expanded": base[:7].reshape(7, 1).expand(7, 5),
        "channels_last": base[: 2 * 3 * 40 * 50].reshape(2, 3, 40, 50).to(memory_format=torch.channels_last),
        "large": torch.arange(3 * MIB + 77, dtype=torch.int64).to(torch.uint8),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
    }
    ks.save(tmp_path / "step", {"t": state})
    monkeypatch.undo()
    wanted = {key: value.clone(memory_format=torch.contiguous_format) for key, value in state.items()}
    plain = {"t": {key: torch.zeros_like(value) for key, value in wanted.items()}}
    ks.load(tmp_path / "step", plain)
    odd = {"t": {key: _strided_like(value) for key, value in wanted.items()}}
    ks.load(tmp_path / "step", odd)
    assert not odd["t"]["transposed"].is_contiguous()
    for key, value in wanted.items():
        assert torch.equal(plain["t"][key], value), key
        assert torch.equal(odd["t"][key], value), key


def _strided_like(value: torch.Tensor) -> torch.Tensor:
    """A zero tensor of that shape in memory that runs the other way, with gaps."""
    if value.dim() < 2:
        return torch.zeros((*value.shape, 2), dtype=value.dtype)[..., 0]
    return torch.zeros((*reversed(value.shape), 2), dtype=value.dtype)[..., 0].permute(*reversed(range(value.dim())))


def test_a_call_that_writes_nothing_ends_in_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: 0)
    storage = LocalStorage(tmp_path)
    with pytest.raises(StorageError, match="no more bytes"):
        write(storage, "a/x", aligned(PAGE))
    with pytest.raises(StorageError, match="no more bytes"):
        storage.put("a/y", b"data")
    monkeypatch.undo()
    assert files(tmp_path) == []


# --- direct I/O ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="no direct I/O on this system")
@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_direct_writes_that_the_file_system_refuses_go_through_the_cache(tmp_path, monkeypatch, code):
    """The open succeeds, the write does not: so it is on some network and overlay file systems."""
    real = os.pwrite
    refused = []

    def pwrite(descriptor, data, at):
        if is_direct(descriptor):
            refused.append(at)
            raise OSError(code, os.strerror(code))
        return real(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    storage = LocalStorage(tmp_path)
    data = aligned(5 * PAGE + 13)
    write(storage, "a/x", data, chunk=2 * PAGE)
    state = {"w": torch.arange(5000.0)}
    ks.save(tmp_path / "step", state)
    monkeypatch.undo()
    assert refused or not _takes_direct(tmp_path)
    assert read(storage, "a/x") == data
    assert torch.equal(ks.open(tmp_path / "step")["w"], state["w"])


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="no direct I/O on this system")
def test_direct_writes_are_used_where_they_can_be(tmp_path, monkeypatch):
    if not _takes_direct(tmp_path):
        pytest.skip("this file system takes no direct I/O")
    real = os.pwrite
    seen = []
    monkeypatch.setattr(
        os, "pwrite", lambda fd, data, at: seen.append((is_direct(fd), at, len(data))) or real(fd, data, at)
    )
    storage = LocalStorage(tmp_path)
    with storage.create("x", 4 * PAGE) as upload:
        upload.write_at(0, aligned(2 * PAGE))
        upload.write_at(2 * PAGE, aligned(10))
        upload.commit(2 * PAGE + 10)
    assert seen == [(True, 0, 2 * PAGE), (False, 2 * PAGE, 10)]


def test_an_unaligned_address_is_no_obstacle(tmp_path):
    """Direct I/O wants aligned memory; offset and length alone do not say whether it is."""
    storage = LocalStorage(tmp_path)
    held = aligned(3 * PAGE)[1 : 1 + 2 * PAGE]
    assert ctypes.addressof(ctypes.c_char.from_buffer(held)) % PAGE == 1
    write(storage, "x", held)
    assert read(storage, "x") == held


def _takes_direct(folder) -> bool:
    try:
        descriptor = os.open(folder / "probe", os.O_CREAT | os.O_RDWR | os.O_DIRECT)
    except OSError:
        return False
    try:
        os.pwrite(descriptor, aligned(PAGE), 0)
    except OSError:
        return False
    finally:
        os.close(descriptor)
        (folder / "probe").unlink()
    return True


# --- no space, no permission -----------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MiB, where mounting one is allowed."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_fills_up_keeps_what_was_committed(small_disk):
    """The save fails with ENOSPC and says so; the step before it stays good; nothing of the attempt is left."""
    state = {"w": torch.arange(100_000, dtype=torch.float32)}
    ks.save(small_disk / "step-00000001", state, step=1)
    before = files(small_disk)
    with pytest.raises(StorageError, match="No space left") as caught:
        ks.save(small_disk / "step-00000002", {"w": torch.zeros(1_000_000)}, step=2)
    assert caught.value.errno == errno.ENOSPC
    assert files(small_disk) == before
    assert torch.equal(ks.open(small_disk / "step-00000001")["w"], state["w"])
    with pytest.raises(ks.errors.StepNotFoundError):
        ks.open(small_disk / "step-00000002")


def test_space_that_ends_in_the_middle_of_a_save(tmp_path, monkeypatch):
    """The same wherever the tests run: the system call fails after 5 MiB."""
    real = os.pwrite
    room = [5 * MIB]

    def pwrite(descriptor, data, at):
        room[0] -= len(data)
        if room[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data, at)

    state = {"w": torch.arange(1000.0)}
    ks.save(tmp_path / "one", state)
    before = files(tmp_path)
    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(StorageError) as caught:
        ks.save(tmp_path / "two", {"model": {"w": torch.zeros(3 * MIB)}})
    monkeypatch.undo()
    assert caught.value.errno == errno.ENOSPC
    assert "rank-00000" in str(caught.value)
    assert files(tmp_path) == before
    assert torch.equal(ks.open(tmp_path / "one")["w"], state["w"])


@pytest.mark.parametrize("failing", ["fsync", "replace", "link", "ftruncate"])
def test_a_failure_at_any_step_of_the_commit_leaves_nothing(tmp_path, monkeypatch, failing):
    """Nothing visible, nothing left over, and the error names the operation."""
    storage = LocalStorage(tmp_path)
    storage.put("a/there", b"before")

    def fail(*_args, **_kwargs):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, failing, fail)
    if failing == "link":
        with pytest.raises(StorageError, match="errno 5"):
            storage.put_new("a/x", b"data")
    else:
        with pytest.raises(StorageError, match="errno 5"):
            write(storage, "a/x", aligned(PAGE))
        with pytest.raises(StorageError, match="errno 5"):
            storage.put("a/there", b"after")
    monkeypatch.undo()
    assert files(tmp_path) == ["a/there"]
    assert read(storage, "a/there") == b"before"


def test_a_path_that_is_a_file(tmp_path):
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(UsageError, match="is a file, not a folder"):
        ks.save(tmp_path / "file", {"w": torch.zeros(3)})
    with pytest.raises(StorageError, match="file is a file, not a folder") as caught:
        ks.save(tmp_path / "file" / "below", {"w": torch.zeros(3)})
    assert caught.value.errno == errno.ENOTDIR
    assert (tmp_path / "file").read_bytes() == b"mine"
    assert files(tmp_path) == ["file"]


def test_a_folder_that_cannot_be_written(tmp_path):
    """Read-only for everybody, root included, where the file system can say so; by its mode otherwise."""
    folder = tmp_path / "locked"
    state = {"w": torch.arange(5.0)}
    ks.save(folder / "one", state)
    immutable = subprocess.run(["chattr", "-R", "+i", str(folder)], capture_output=True, check=False).returncode == 0
    if not immutable and os.geteuid() == 0:
        pytest.skip("nothing keeps root from writing here")
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR) if not immutable else None
    try:
        with pytest.raises(StorageError) as caught:
            ks.save(folder / "two", state)
        assert caught.value.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
        assert torch.equal(ks.open(folder / "one")["w"], state["w"])
    finally:
        if immutable:
            subprocess.run(["chattr", "-R", "-i", str(folder)], check=True)
        else:
            folder.chmod(0o700)
    assert sorted(path.name for path in folder.iterdir()) == ["one"]


# --- links, pipes, folders in the wrong place ------------------------------------------------------------------------


@pytest.mark.case(162)
def test_links_out_of_the_root_are_neither_read_nor_written(tmp_path):
    outside, root = tmp_path / "outside", tmp_path / "root"
    outside.mkdir()
    root.mkdir()
    (outside / "secret").write_bytes(b"secret")
    (root / "folder").symlink_to(outside, target_is_directory=True)
    (root / "file").symlink_to(outside / "secret")
    (root / "circle").symlink_to(root / "circle")
    storage = LocalStorage(root)
    for name in ("folder/secret", "file", "circle", "circle/x"):
        with pytest.raises(StorageError):
            storage.open(name)
    for call in (
        lambda: storage.create("folder/new", 1),
        lambda: storage.put("folder/secret", b"changed"),
        lambda: storage.put_new("folder/new", b"new"),
        lambda: storage.delete(["folder/secret"]),
        lambda: list(storage.list("folder")),
    ):
        with pytest.raises(StorageError, match="a link leads out"):
            call()
    storage.put("file", b"mine")
    storage.delete(["circle"])
    assert files(outside) == ["secret"]
    assert (outside / "secret").read_bytes() == b"secret"
    assert read(storage, "file") == b"mine"


def test_a_root_that_is_a_link_is_the_users_own_affair(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk", target_is_directory=True)
    ks.save(tmp_path / "runs" / "one", {"w": torch.arange(3.0)})
    assert torch.equal(ks.open(tmp_path / "disk" / "one")["w"], torch.arange(3.0))
    assert torch.equal(ks.open(tmp_path / "runs" / "one")["w"], torch.arange(3.0))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes on this system")
def test_what_is_no_file_is_not_waited_for(tmp_path):
    """Opening a pipe for reading waits for a writer that never comes."""
    storage = LocalStorage(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(StorageError, match="not a regular file"):
            storage.open(name)
    os.mkfifo(tmp_path / ".metadata")
    with pytest.raises(ks.errors.CheckpointError):
        ks.open(tmp_path)


def test_descriptors_are_given_back(tmp_path):
    """After commits, abandoned uploads, reads and refusals."""
    if not os.path.isdir("/proc/self/fd"):  # noqa: PTH112
        pytest.skip("no /proc here")
    storage = LocalStorage(tmp_path)
    (tmp_path / "folder").mkdir()
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for index in range(5):
        write(storage, f"a/{index}", aligned(PAGE))
        storage.create(f"b/{index}", 1).close()
        storage.put("c", b"x")
        read(storage, "c")
        with pytest.raises(StorageError):
            storage.open("folder")
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    assert not [name for name in files(tmp_path) if name.endswith(".partial")]
