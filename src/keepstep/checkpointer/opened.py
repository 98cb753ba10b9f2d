"""A committed step opened for looking: one process, nothing is read before it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, KeysView, Mapping, Sequence
from typing import Any

import msgspec
import torch

from keepstep.checkpointer.foreign import show_foreign
from keepstep.checkpointer.loading import found_manifest, read_own, read_trees
from keepstep.errors import ClosedError, StepNotFoundError, UsageError
from keepstep.foreign.kinds import FOREIGN
from keepstep.format.box import Box, whole
from keepstep.format.dtypes import ITEM_BYTES
from keepstep.format.layout import Structure, TensorSpec, Want
from keepstep.format.manifest import MANIFEST_NAME, STATE_FOLDER, Manifest, parse_manifest
from keepstep.format.objects import TensorRef
from keepstep.move.reader import read_named, read_pieces
from keepstep.plan.load_plan import find_pieces
from keepstep.state.shard import torch_dtype
from keepstep.state.values import materialise
from keepstep.storage.base import Closing
from keepstep.storage.local import Place, storage_of

__all__ = ["Checkpoint", "open"]


def open(path: Place) -> Checkpoint:
    """Opens a committed step for reading in this process. Not collective; reads the manifest only.

    Raises:
        StepNotFoundError: no step is committed there.
        CorruptError, FormatError: the manifest is damaged or newer than this keepstep, or files are missing.
    """
    return Checkpoint(path)


class Checkpoint(Closing, Mapping[str, torch.Tensor]):
    """Tensors by key, whole and on the host, each read and proved when it is asked for.

    Files are opened for each read: a step that is replaced or removed meanwhile raises, and never returns wrong bytes.
    """

    def __init__(self, path: Place) -> None:
        self._storage = storage_of(path)
        raw = found_manifest(self._storage)
        if raw[:1] == FOREIGN:
            self._storage, raw = show_foreign(self._storage, raw)
        self.manifest: Manifest = parse_manifest(raw, f"{self._storage.url}/{MANIFEST_NAME}")
        self._structure = self.manifest.structure
        self._specs = {spec.key: spec for spec in self.manifest.tensors}
        self._closed = False

    def __getitem__(self, key: str) -> torch.Tensor:
        """The whole tensor of that key, from all the pieces it was saved in.

        Raises:
            StepNotFoundError: there is no such key; KeyError is not raised, the message lists close ones.
            CorruptError: its bytes are not what was written.
        """
        return self._read(*self._found(key))

    def parts(self, key: str, most_bytes: int, within: Box | None = None) -> Iterator[torch.Tensor]:
        """The tensor of that key in parts of at most so many bytes, each of one dimension, in row-major order.

        What is held at once is one part; blocks that two parts share are read for both. With ``within``, a box of the
        tensor, it is the elements of that alone.

        Raises:
            StepNotFoundError, CorruptError: as for the whole tensor.
            UsageError: the box is not one of that tensor.
        """
        spec, shape = self._found(key)
        if within is not None and not within.inside(shape.sizes):
            raise UsageError(f"{key!r} has the shape {list(shape.sizes)}; {within} is not within it")
        most = max(1, most_bytes // ITEM_BYTES[spec.dtype])
        for box in _cut(within or shape, most):
            yield self._read(spec, box).flatten()

    def together(self, keys: Sequence[str]) -> dict[str, torch.Tensor]:
        """The whole tensors of these keys, read at once: of many small ones that is far sooner than one after another.

        Raises:
            StepNotFoundError, CorruptError: as for a whole tensor.
        """
        found = [self._found(key) for key in keys]
        targets = [torch.empty(box.sizes, dtype=torch_dtype(spec.dtype), device="cpu") for spec, box in found]
        wants = [Want(spec.key, box) for spec, box in found]
        pieces = find_pieces(self._structure, wants, -1)
        read_pieces(self._storage, self.manifest, pieces, wants=wants, targets=targets)
        return dict(zip(keys, targets, strict=True))

    def spec(self, key: str) -> TensorSpec:
        """Dtype, layout and folder of the tensor of that key, under the key it is stored as; reads nothing.

        Raises:
            StepNotFoundError: there is no such key.
        """
        return self._found(key)[0]

    def shape(self, key: str) -> tuple[int, ...]:
        """The global shape of the tensor of that key; reads nothing.

        Raises:
            StepNotFoundError: there is no such key.
        """
        return self._found(key)[1].sizes

    def _found(self, key: str) -> tuple[TensorSpec, Box]:
        self._check_open()
        spec = self._specs.get(self.manifest.aliases.get(key, key))
        if spec is None:
            near = [known for known in self if known.rpartition("/")[2] == key.rpartition("/")[2]][:5]
            raise NoSuchKeyError(f"no tensor {key!r} in {self._storage.url}; {len(self)} keys, near it: {near}")
        return spec, whole(self._structure.layouts[spec.layout].shape)

    def _read(self, spec: TensorSpec, box: Box) -> torch.Tensor:
        target = torch.empty(box.sizes, dtype=torch_dtype(spec.dtype), device="cpu")
        want = Want(spec.key, box)
        # (Of all the tensors only this one matters.)
        alone = Structure(self._structure.meshes, self._structure.layouts, (spec,))
        pieces = find_pieces(alone, [want], -1)
        read_pieces(self._storage, self.manifest, pieces, wants=[want], targets=[target])
        return target

    def __iter__(self) -> Iterator[str]:
        """Keys of all tensors, tied ones included."""
        yield from self._specs
        yield from self.manifest.aliases

    def __len__(self) -> int:
        """The number of keys."""
        return len(self._specs) + len(self.manifest.aliases)

    def __contains__(self, key: object) -> bool:
        """Whether there is a tensor of that key; reads nothing."""
        return key in self._specs or key in self.manifest.aliases

    def keys(self) -> KeysView[str]:
        """Keys of all tensors."""
        return KeysView(self)

    @property
    def step(self) -> int:
        """The step."""
        return self.manifest.step

    def tree_of(self, rank: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
        """All plain values as saved, with references for tensors; and those that this rank has of its own, by key."""
        self._check_open()
        return read_trees(self._storage, self.manifest, rank)

    def own_of(self, rank: int) -> dict[str, Any]:
        """What this rank saved for itself, by key, with references for its tensors; empty where it has nothing."""
        self._check_open()
        if all(record.rank != rank for record in self.manifest.files.get(STATE_FOLDER, ())):
            return {}
        return read_own(self._storage, self.manifest, [rank], {})[rank]

    def own_tensor(self, rank: int, ref: TensorRef) -> torch.Tensor:
        """A tensor that this rank saved for itself, read and proved."""
        self._check_open()
        target = torch.empty(ref.shape, dtype=torch_dtype(ref.dtype), device="cpu")
        read_named(self._storage, self.manifest, STATE_FOLDER, rank=rank, targets={ref.key: target})
        return target

    def values_of(self, component: str) -> Any:
        """The saved tree of a component: its plain values, with tensors read where they stand.

        Raises:
            StepNotFoundError: there is no such component.
        """
        self._check_open()
        tree, _ = read_trees(self._storage, self.manifest, 0)
        if component in self.manifest.dropped:
            raise StepNotFoundError(
                f"{self._storage.url} holds no {component!r} any more: its files were let go, to keep the weights alone"
            )
        if component not in tree:
            raise StepNotFoundError(f"no component {component!r} in {self._storage.url}; it has {', '.join(tree)}")
        return materialise(tree[component], self)

    def describe(self) -> dict[str, Any]:
        """Plain facts: step, lineage, world, versions, configuration, components with counts and bytes."""
        manifest = self.manifest
        return {
            "url": self._storage.url,
            "step": manifest.step,
            "created": manifest.created,
            "run": manifest.lineage.run,
            "incarnation": manifest.lineage.incarnation,
            "world_size": manifest.world_size,
            "format": ".".join(map(str, manifest.format)),
            "versions": {name: getattr(manifest.versions, name) for name in manifest.versions.__struct_fields__},
            "config": msgspec.json.decode(manifest.config),
            "metrics": dict(manifest.metrics),
            "dropped": list(manifest.dropped),
            "tensors": len(manifest.tensors),
            "layouts": len(manifest.layouts),
            "files": sum(len(records) for records in manifest.files.values()),
            "bytes": manifest.total_bytes,
            "components": {
                name: {field: getattr(part, field) for field in part.__struct_fields__}
                for name, part in manifest.components.items()
            },
        }

    def close(self) -> None:
        """Ends the use of this object. Idempotent."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self._storage.url} was closed")


def _cut(box: Box, most: int) -> Iterator[Box]:
    """The box in runs of at most so many elements, in row-major order; nothing of an empty one."""
    if box.elements <= most:
        if box.elements:
            yield box
        return
    dim = next(d for d, size in enumerate(box.sizes) if size > 1)
    length = max(1, most * box.sizes[dim] // box.elements)
    for start in range(0, box.sizes[dim], length):
        at, size = box.offsets[dim] + start, min(length, box.sizes[dim] - start)
        offsets = (*box.offsets[:dim], at, *box.offsets[dim + 1 :])
        yield from _cut(Box(offsets, (*box.sizes[:dim], size, *box.sizes[dim + 1 :])), most)


class NoSuchKeyError(StepNotFoundError, KeyError):
    """No tensor of that key; also a KeyError, as a mapping's users expect."""

    __str__ = StepNotFoundError.__str__
