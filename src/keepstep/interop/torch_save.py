"""Files of ``torch.save``: shown as steps, which everything that reads steps reads; and steps, written as such a file.

Neither way runs anything of a file: it is read with ``weights_only=True``, and what that would refuse is not written.
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
import pickle
import secrets
import tempfile
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from keepstep.checkpointer.foreign import show_foreign
from keepstep.checkpointer.loading import found_manifest, read_trees
from keepstep.errors import (
    CorruptError,
    StepExistsError,
    StepNotFoundError,
    StorageError,
    UnsafeFileError,
    UnsafeValueError,
    UsageError,
)
from keepstep.foreign.kinds import FOREIGN
from keepstep.foreign.shown import ShownStep
from keepstep.format.box import whole
from keepstep.format.dtypes import ITEM_BYTES
from keepstep.format.globs import near
from keepstep.format.layout import Want
from keepstep.format.manifest import MANIFEST_NAME, Manifest, parse_manifest
from keepstep.format.objects import ObjectNode, RankRef, join
from keepstep.format.shardfile import digest
from keepstep.move.reader import read_pieces
from keepstep.plan.load_plan import find_pieces
from keepstep.state.optimizer import at_names
from keepstep.state.shard import torch_dtype
from keepstep.state.values import materialise
from keepstep.storage.base import Storage
from keepstep.storage.local import LocalStorage, Place, storage_of, sync_folder

__all__ = ["WrittenFile", "export", "exporting", "proving", "show_file"]

IN_MEMORY_BYTES = 1 << 26
"""Up to so much a file is put together in memory; more goes through a file without a name beside it."""
READ_BYTES = 1 << 22
TOGETHER_BYTES = 1 << 26
"""Tensors are read together until they are so large."""
_ALIGNMENT = 64
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)
_WALKED = (list, tuple, set, dict, OrderedDict, Counter)


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file of ``torch.save``: where it is, what is in it, and the bytes of its tensors."""

    path: str
    step: int
    components: tuple[str, ...]
    tensors: int
    bytes: int


def show_file(
    file: str | os.PathLike[str],
    *,
    component: str = "model",
    names: Sequence[str] | None = None,
    only: Sequence[str] = (),
    step: int = 0,
) -> ShownStep:
    """The step that a file of ``torch.save`` holds; pass it wherever a step is read: ``ks.load(show_file(...), into)``.

    Tensors stay in the file until they are asked for, where its format allows that: that of torch 1.6 and later. What is no
    tensor is read now. A dictionary of the parts of a state becomes those parts; anything else, such as the state_dict of a
    model, becomes one part, called ``component``.

    Args:
        file: its path.
        component: what to call what has no name.
        names: names of the model's parameters, in their order: what optimizers have by position gets these names. Without
            them it keeps its positions, by which a load finds the parameters of the optimizer that it fills.
        only: the parts to show; all of them when it is empty.
        step: the number to show it under.

    Raises:
        UnsafeFileError: it names classes that ``weights_only`` refuses; lists all of them.
        UnsafeValueError: it holds what a step cannot; lists all of it.
        CorruptError: it is damaged, or no such file. StepNotFoundError: there is none.
    """
    path = Path(file).expanduser().absolute()
    if not path.is_file():
        raise StepNotFoundError(f"there is no file {path}")
    value = _loaded(path)
    parts = value if _is_state(value) else {component: value}
    absent = [name for name in only if name not in parts]
    if absent:
        hint = "".join(near(name, list(parts)) for name in absent)
        raise UsageError(f"only={', '.join(absent)}: {path} has {', '.join(parts)}{hint}")
    parts = {name: part for name, part in parts.items() if not only or name in only}
    if names is not None:
        parts = {name: _named(part, list(names), join("", name)) for name, part in parts.items()}
    shown = ShownStep(LocalStorage(path.parent), parts, (), name=f"{_identity(path):016x}", step=step)
    shown.url = str(path)
    return shown


def proving(file: str | os.PathLike[str]) -> Iterator[int]:
    """Compares every byte of the file with the checksums in it; gives how many bytes that were. Without any, gives nothing.

    Raises:
        CorruptError: a record is damaged.
    """
    done = 0
    try:
        with zipfile.ZipFile(file) as archive:
            infos = archive.infolist()
            if not any(info.CRC for info in infos):
                # torch was told not to make any.
                return
            for info in infos:
                with archive.open(info) as record:
                    while part := record.read(READ_BYTES):
                        done += len(part)
                        yield done
    except (zipfile.BadZipFile, EOFError) as err:
        if zipfile.is_zipfile(file):
            raise CorruptError(f"{file}: {err}") from err


def export(
    step: Place,
    file: str | os.PathLike[str],
    *,
    only: Sequence[str] | None = None,
    component: str | None = None,
    overwrite: bool = False,
) -> WrittenFile:
    """Writes a step as one file that ``torch.load`` reads, with ``weights_only=True`` too. Not collective.

    The file holds a dictionary of the parts of the state: state_dicts as modules and optimizers give them, whatever layout
    they were saved in. Optimizers have positions in place of names, as torch's own have. Memory is a few chunks; a large
    file needs its size twice on the disk until it is whole.

    Args:
        step: the folder of the step; what another program has saved does as well.
        file: the path. It gets its name when it is whole and durable.
        only: the parts to write; by default all of them.
        component: one part alone, without a dictionary around it: the state_dict of a model, say.
        overwrite: whether a file that is there may be replaced.

    Raises:
        UnsafeValueError: values that ``weights_only`` refuses, or that one rank has of its own; lists all of them.
        StepNotFoundError: no such step or component. StepExistsError: the file is there, and ``overwrite`` is False.
        CorruptError, StorageError: nothing got its name.
    """
    *_, last = exporting(step, file, only=only, component=component, overwrite=overwrite)
    return last


def exporting(
    step: Place,
    file: str | os.PathLike[str],
    *,
    only: Sequence[str] | None = None,
    component: str | None = None,
    overwrite: bool = False,
) -> Iterator[WrittenFile]:
    """The same, bit by bit: gives what was read so far, and the whole of it once the file has its name."""
    path = Path(file).expanduser().absolute()
    if only is not None and component is not None:
        raise UsageError("only= and component= do not go together")
    if path.is_dir() or (path.exists() and not overwrite):
        raise StepExistsError(f"{path} is there already; nothing was written. overwrite=True replaces a file")
    storage = storage_of(step)
    raw = found_manifest(storage)
    if raw[:1] == FOREIGN:
        storage, raw = show_foreign(storage, raw)
    manifest = parse_manifest(raw, f"{storage.url}/{MANIFEST_NAME}")
    tree, _ = read_trees(storage, manifest, 0)
    wanted = [component] if component is not None else list(tree if only is None else only)
    absent = [name for name in wanted if name not in tree]
    if absent:
        hint = "".join(near(name, list(tree)) for name in absent)
        raise StepNotFoundError(
            f"no component {', '.join(map(repr, absent))} in {storage.url}; it has {', '.join(tree)}{hint}"
        )
    chosen = {name: _by_position(tree[name]) for name in wanted}
    refused: list[str] = []
    specs = {spec.key: spec for spec in manifest.tensors}
    keys = [spec.key for spec in manifest.tensors if spec.key.partition("/")[0] in {join("", name) for name in wanted}]
    keys += [
        stored for key, stored in manifest.aliases.items() if key.partition("/")[0] in {join("", n) for n in wanted}
    ]
    total = sum(manifest.structure.tensor_bytes(specs[key]) for key in dict.fromkeys(keys))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _memory(path.parent, total + _ALIGNMENT * len(keys)) as memory:
            tensors: dict[str, torch.Tensor] = {}
            for done in _filled(storage, manifest, list(dict.fromkeys(keys)), memory=memory, made=tensors):
                yield WrittenFile(str(path), manifest.step, tuple(wanted), len(tensors), done)
            values = {**tensors, **{key: tensors[at] for key, at in manifest.aliases.items() if at in tensors}}
            state = {name: materialise(node, values) for name, node in chosen.items()}
            for name, value in state.items():
                _refuse(value, join("", name), refused)
            if refused:
                raise UnsafeValueError(refused)
            _put(state if component is None else state[component], path)
    except OSError as err:
        raise err if isinstance(err, StorageError) else StorageError("write", path.name, err) from err
    yield WrittenFile(str(path), manifest.step, tuple(wanted), len(tensors), total)


def _loaded(path: Path) -> Any:
    mapped = zipfile.is_zipfile(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as err:
        lines = str(err).splitlines()
        try:
            unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(path) if mapped else []
        except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, IndexError, TypeError) as again:
            raise CorruptError(f"{path} cannot be read: {again}") from err
        if not unsafe and "Unsupported" not in str(err) and "GLOBAL" not in str(err):
            raise CorruptError(f"{path} cannot be read: {lines[0]}") from err
        hint = "where you trust it: torch.serialization.add_safe_globals([{}])"
        named = [f"{path.name}: {name}; {hint.format(name.rpartition('.')[2])}" for name in sorted(unsafe)]
        raise UnsafeFileError(named or [f"{path.name}: {lines[0]}"]) from err
    except (RuntimeError, EOFError, ValueError, KeyError, IndexError, TypeError, AttributeError) as err:
        raise CorruptError(f"{path} is damaged, or no file of torch.save: {err}") from err
    except OSError as err:
        if err.errno == errno.EINVAL:
            # A seek to before the beginning.
            raise CorruptError(f"{path} is cut off, or no file of torch.save") from err
        raise StorageError("open", path.name, err) from err


def _identity(path: Path) -> int:
    """The same for the same bytes, as far as the file's own checksums tell; of an old file, its size."""
    if not zipfile.is_zipfile(path):
        return path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        pickled = next((name for name in archive.namelist() if name.endswith("/data.pkl")), "")
        told = [(info.filename, info.CRC, info.file_size) for info in archive.infolist()]
        return digest(repr(told).encode() + (archive.read(pickled) if pickled else b""))


def _is_state(value: Any) -> bool:
    """Whether it is a dictionary of parts: named, and none of them a tensor."""
    return (
        isinstance(value, dict)
        and len(value) > 0
        and all(type(name) is str and name for name in value)
        and not any(isinstance(part, torch.Tensor) for part in value.values())
    )


def _is_optimizer(part: Any) -> bool:
    return (
        isinstance(part, Mapping) and isinstance(part.get("state"), dict) and isinstance(part.get("param_groups"), list)
    )


def _named(part: Any, names: list[str], key: str) -> Any:
    """An optimizer's state with names for positions; anything else as it is."""
    if not _is_optimizer(part):
        return part
    named = at_names(part, names)
    if named is part and any(type(number) is int for group in part["param_groups"] for number in group["params"]):
        count = sum(len(group["params"]) for group in part["param_groups"])
        raise UsageError(f"{key} has {count:,} parameters, and {len(names):,} names were given")
    return named


def _by_position(node: Any) -> Any:
    """A saved tree whose optimizers have positions for names, in the order of their groups."""
    if type(node) is ObjectNode and node.kind == "optimizer" and _is_optimizer(node.tree):
        part = node.tree
        order = [name for group in part["param_groups"] for name in group["params"]]
        at = {name: number for number, name in enumerate(order)}
        state = {at.get(name, name): value for name, value in part["state"].items()}
        groups = [{**group, "params": [at[name] for name in group["params"]]} for group in part["param_groups"]]
        return {**part, "state": state, "param_groups": groups}
    if type(node) is dict:
        return {key: _by_position(item) for key, item in node.items()}
    if type(node) in (list, tuple):
        return type(node)(_by_position(item) for item in node)
    return node


@contextlib.contextmanager
def _memory(folder: Path, size: int) -> Iterator[Any]:
    """Memory for the tensors: of the machine while they are small, else of a file that goes with it."""
    if size <= IN_MEMORY_BYTES:
        yield bytearray(size)
        return
    with tempfile.TemporaryFile(dir=folder) as scratch:
        scratch.truncate(size)
        # (Tensors may still refer to it: it is unmapped when the last of them is gone.)
        yield mmap.mmap(scratch.fileno(), size)


def _filled(
    storage: Storage, manifest: Manifest, keys: list[str], *, memory: Any, made: dict[str, torch.Tensor]
) -> Iterator[int]:
    """Fills ``made``: every tensor, whole, each with a storage of its own in the memory. Gives the bytes read so far."""
    specs = {spec.key: spec for spec in manifest.tensors}
    structure = manifest.structure
    wants: list[Want] = []
    position = done = pending = 0
    for key in keys:
        spec = specs[key]
        shape = manifest.layouts[spec.layout].shape
        count = math.prod(shape)
        size = count * ITEM_BYTES[spec.dtype]
        raw = (
            torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=position)
            if size
            else torch.empty(0, dtype=torch.uint8)
        )
        made[key] = raw.view(torch_dtype(spec.dtype)).view(shape)
        wants.append(Want(key, whole(shape)))
        position += -(-size // _ALIGNMENT) * _ALIGNMENT
        pending += size
        if pending >= TOGETHER_BYTES or key == keys[-1]:
            pieces, targets = find_pieces(structure, wants, -1), [made[want.key] for want in wants]
            read_pieces(storage, manifest, pieces, wants=wants, targets=targets)
            done, pending = done + pending, 0
            wants.clear()
            yield done


def _refuse(value: Any, key: str, refused: list[str]) -> None:
    """Notes what ``weights_only`` would not read."""
    kind = type(value)
    if kind in _PLAIN or isinstance(value, torch.Tensor):
        return
    if kind is RankRef:
        refused.append(f"{key}: each rank has a value of its own; leave it out (only=[...])")
    elif kind in (dict, OrderedDict, Counter):
        for name, item in value.items():
            if type(name) not in (*_PLAIN, tuple):
                refused.append(f"{join(key, str(name))}: a {type(name).__name__} as a key")
            _refuse(item, join(key, name if type(name) in (str, int) else str(name)), refused)
    elif kind in _WALKED:
        for number, item in enumerate(value):
            _refuse(item, join(key, number), refused)
    elif kind not in torch.serialization.get_safe_globals():
        refused.append(f"{key}: a {kind.__name__}, which weights_only refuses; leave the part out (only=[...])")


def _put(value: Any, path: Path) -> None:
    """Writes beside the name, proves that it can be read, makes it durable, and gives it its name."""
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    try:
        torch.save(value, partial)
        _loaded(partial)
        descriptor = os.open(partial, os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        partial.replace(path)
        sync_folder(path.parent)
    finally:
        partial.unlink(missing_ok=True)
