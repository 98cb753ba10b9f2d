"""The tensors of a step as its manifest lists them: what ``keepstep show`` chooses from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from keepstep.cli.words import layout_words, near_pattern, piece_count
from keepstep.errors import UsageError
from keepstep.format.globs import near
from keepstep.format.layout import Layout, Mesh, parts
from keepstep.format.manifest import Manifest

__all__ = ["TensorLine", "holders_of", "tensor_lines"]


@dataclass(frozen=True, slots=True)
class TensorLine:
    """One tensor. ``same_as`` is set for a tied one, which is stored under that other key and takes no bytes.

    ``ranks`` is how many of them hold something of it.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    layout: str
    pieces: int
    folder: str
    bytes: int
    ranks: int
    same_as: str | None = None


def tensor_lines(manifest: Manifest, pattern: str, components: Sequence[str] = ()) -> tuple[TensorLine, ...]:
    """The tensors whose key fits, of these components or of all, in the order of the state, tied ones after the others.

    Raises:
        UsageError: a component that is not there, or no key fits the pattern.
    """
    for name in components:
        if name not in manifest.components:
            known = list(manifest.components)
            raise UsageError(f"there is no component {name!r}; the step has {', '.join(known)}{near(name, known)}")
    words = [(layout_words(each, manifest.meshes), piece_count(each, manifest.meshes)) for each in manifest.layouts]
    ranks = [len(_holders(each, manifest.meshes)) for each in manifest.layouts]
    structure = manifest.structure
    lines: dict[str, TensorLine] = {}
    for spec in manifest.tensors:
        shape, size = manifest.layouts[spec.layout].shape, structure.tensor_bytes(spec)
        held = ranks[spec.layout]
        lines[spec.key] = TensorLine(spec.key, spec.dtype, shape, *words[spec.layout], spec.folder, size, held)
    tied = []
    for key, stored in manifest.aliases.items():
        line = lines.get(stored)
        if line is not None:
            tied.append(replace(line, key=key, bytes=0, same_as=stored))
    there = [line for line in (*lines.values(), *tied) if not components or line.key.partition("/")[0] in components]
    found = tuple(line for line in there if fnmatchcase(line.key, pattern))
    if not found and there:
        keys = [line.key for line in there]
        raise UsageError(
            f"no key fits {pattern!r}; there are {len(keys):,} keys, such as {', '.join(keys[:3])}"
            f"{near_pattern(pattern, keys)}"
        )
    return found


def holders_of(manifest: Manifest) -> Mapping[str, frozenset[int]]:
    """The ranks that hold something of each tensor, tied ones too, by key."""
    each = [_holders(layout, manifest.meshes) for layout in manifest.layouts]
    found = {spec.key: each[spec.layout] for spec in manifest.tensors}
    return found | {key: found[stored] for key, stored in manifest.aliases.items() if stored in found}


def _holders(layout: Layout, meshes: tuple[Mesh, ...]) -> frozenset[int]:
    if layout.boxes is not None:
        return frozenset(rank for rank, _ in layout.boxes)
    return frozenset(rank for rank in meshes[layout.mesh].members() if parts(layout, list(meshes), rank))
