"""A folder of safetensors, as the hub has them, shown as a step of one component."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from keepstep.errors import CorruptError, StepNotFoundError, StorageError
from keepstep.foreign.safetensors.files import StoredTensor, parse_file
from keepstep.foreign.shown import OpenFiles, Piece, ShownStep, ShownTensor, Source
from keepstep.format.box import whole
from keepstep.format.objects import ObjectNode, TensorRef, join
from keepstep.format.shardfile import digest
from keepstep.storage.base import Blob, Storage, read_blob
from keepstep.storage.local import LocalStorage, check_name

__all__ = ["show_folder"]

MAX_INDEX_BYTES = 1 << 28
MAX_REF_BYTES = 1 << 10
_INDEX = re.compile(r"[^/]+\.safetensors\.index\.json")
_FILE = re.compile(r"[^/]+\.safetensors")
_SERIES = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")


def show_folder(storage: Storage, component: str = "model", *, file: str = "", step: int = 0) -> ShownStep:
    """The step that a folder of safetensors holds: read are the headers of its files, and tensors when they are asked for.

    Files with an index, a single file, a complete series of them, or a repository in the cache of the hub: there its
    revision ``main``, or the only one.

    Args:
        storage: the folder.
        component: what to call the model.
        file: this one of its files alone.
        step: the number to show it under.

    Raises:
        StepNotFoundError: there are no such files, or it is not clear which of them are meant.
        CorruptError: a file is missing or no safetensors, or index and files contradict each other; lists everything.
    """
    place = _followed(storage if file else _snapshot(storage))
    names = sorted(name for name, _ in place.list("") if "/" not in name)
    indices = [name for name in names if _INDEX.fullmatch(name)]
    if "model.safetensors.index.json" in indices:
        indices = ["model.safetensors.index.json"]
    if file:
        indices, names = [], [file]
    if len(indices) > 1:
        raise StepNotFoundError(
            f"{place.url} has several indices: {', '.join(indices[:4])}; keep the one that is meant"
        )
    where = _read_index(place, indices[0], names) if indices else None
    chosen = [file] if file else sorted(set(where.values())) if where is not None else _without_index(place, names)
    files = OpenFiles(place)
    found: dict[str, tuple[str, StoredTensor]] = {}
    wrong = []
    try:
        for name in chosen:
            for one in parse_file(files.of(name), name):
                if where is not None and where.get(one.name) != name:
                    continue
                if one.name in found:
                    wrong.append(f"{one.name!r} is in {found[one.name][0]} and in {name}")
                found[one.name] = name, one
    finally:
        files.close()
    for name, file in (where or {}).items():
        if name not in found:
            wrong.append(f"{file} has no {name!r}, which the index expects there")
    if wrong:
        more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise CorruptError(f"{place.url}: {'; '.join(wrong[:8])}{more}")
    return _shown(place, found if where is None else {name: found[name] for name in where}, component, step)


def _shown(place: Storage, found: Mapping[str, tuple[str, StoredTensor]], component: str, step: int) -> ShownStep:
    tree = {}
    tensors = []
    path = join("", component)
    for name, (file, one) in found.items():
        key = join(path, name)
        tree[name] = TensorRef(key, one.dtype, one.shape)
        tensors.append(ShownTensor(key, one.dtype, one.shape, (Piece(0, whole(one.shape), _Range(file, one.start)),)))
    text = msgspec.json.encode([(file, one) for file, one in found.values()])
    state = {component: ObjectNode("module", "Module", tree)}
    return ShownStep(place, state, tensors, name=f"{digest(text):016x}", step=step)


def _read_index(place: Storage, name: str, names: Sequence[str]) -> dict[str, str]:
    """The file of each tensor; all of them are there."""
    try:
        where = msgspec.json.decode(read_blob(place, name, MAX_INDEX_BYTES), type=_Index).weight_map
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
        raise CorruptError(f"{place.url}/{name} is no index of safetensors: {err}") from err
    missing = sorted(set(where.values()) - set(names))
    if missing:
        some = ", ".join(missing[:8])
        raise CorruptError(f"{place.url}: {len(missing)} of the files that {name} names are missing: {some}")
    return where


def _without_index(place: Storage, names: Sequence[str]) -> list[str]:
    files = [name for name in names if _FILE.fullmatch(name)]
    if "model.safetensors" in files or len(files) == 1:
        return ["model.safetensors"] if "model.safetensors" in files else files
    if not files:
        raise StepNotFoundError(f"{place.url} has no safetensors files")
    series = [_SERIES.fullmatch(name) for name in files]
    if all(series) and len({(match[1], match[3]) for match in series if match}) == 1 and series[0]:
        count = int(series[0][3])
        numbers = {int(match[2]) for match in series if match}
        absent = sorted(set(range(1, count + 1)) - numbers)
        if not absent:
            return files
        raise CorruptError(f"{place.url}: of {count:,} files, numbers {', '.join(map(str, absent[:8]))} are missing")
    raise StepNotFoundError(f"{place.url} has several files and no index: {', '.join(files[:4])}; name one of them")


def _snapshot(storage: Storage) -> Storage:
    """Of a repository in the cache of the hub, the folder of one revision; anything else is what it is."""
    if not isinstance(storage, LocalStorage) or not (storage.root / "snapshots").is_dir():
        return storage
    there = sorted(path.name for path in (storage.root / "snapshots").iterdir() if path.is_dir())
    try:
        chosen = read_blob(storage, "refs/main", MAX_REF_BYTES).decode("ascii", "replace").strip()
    except StorageError:
        chosen = there[0] if len(there) == 1 else ""
    if chosen not in there:
        raise StepNotFoundError(f"{storage.url}/snapshots has {', '.join(there[:4]) or 'nothing'}; name one of them")
    return LocalStorage(storage.root / "snapshots" / chosen)


def _followed(storage: Storage) -> Storage:
    return _Linked(storage.root) if isinstance(storage, LocalStorage) else storage


class _Linked(LocalStorage):
    """A local folder whose files may be links, as those of the hub's cache are; only for reading."""

    def open(self, name: str) -> Blob:
        """Opens what the link leads to."""
        try:
            path = (self.root / check_name(name)).resolve(strict=True)
        except OSError as err:
            raise StorageError("open", name, err) from err
        return LocalStorage(path.parent).open(path.name)


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Range(Source):
    """The bytes of a tensor from ``start`` of a file on."""

    file: str
    start: int

    def read_into(self, files: OpenFiles, offset: int, buffer: memoryview) -> None:
        """As they stand there."""
        files.of(self.file).read_into(self.start + offset, buffer)
