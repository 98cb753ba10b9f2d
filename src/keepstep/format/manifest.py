"""The manifest: the JSON record that makes a step exist, and the names of everything in a run's folder.

A manifest is one JSON object, readable with jq. ``digest`` is the xxh3-64 of the object without that field, so a manifest
vouches for itself; ``files`` holds a digest of each shard file's header, and each header holds the digests of the data.
Layouts are stored once and shared by tensors: the size grows with tensors + ranks, not with tensors x ranks.
"""

from __future__ import annotations

import math
import re

import msgspec

from keepstep.errors import CorruptError, FormatError
from keepstep.format.box import check_partition
from keepstep.format.dtypes import ITEM_BYTES
from keepstep.format.layout import Layout, Mesh, Structure, TensorSpec
from keepstep.format.shardfile import digest

__all__ = [
    "FORMAT_MAJOR",
    "FORMAT_MINOR",
    "HEAD_BYTES",
    "MANIFEST_NAME",
    "MAX_ELEMENTS",
    "OWN_NAME",
    "STATE_FOLDER",
    "TREE_NAME",
    "VERSION",
    "Component",
    "FileRecord",
    "Head",
    "Lineage",
    "Manifest",
    "Parent",
    "Receipt",
    "Versions",
    "file_name",
    "pack_manifest",
    "parse_head",
    "parse_manifest",
    "parse_step_name",
    "promised_files",
    "proves_itself",
    "safe_folder",
    "step_name",
]

VERSION = "0.1.0"
FORMAT_MAJOR = 1
FORMAT_MINOR = 2
MANIFEST_NAME = ".metadata"
STATE_FOLDER = "state"
TREE_NAME = "~tree"
"""The entry of rank 0's state file that holds the plain values all ranks share."""
OWN_NAME = "~own"
"""The entry of a rank's state file that holds the plain values of that rank alone."""
MAX_WORLD = 1 << 20
MAX_DIMENSIONS = 64
MAX_ELEMENTS = 1 << 58
"""Of one tensor, empty dimensions counted as one: no product of them overflows anywhere."""
_STEP = re.compile(r"step-(\d{8,18})")
_FOLDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")
_SAVE_ID = re.compile(r"[0-9a-f]{8,32}")


class FileRecord(msgspec.Struct, frozen=True, array_like=True):
    """One durable shard file: total size, bytes of tensor data, and the digest of its header."""

    rank: int
    size_bytes: int
    data_bytes: int
    header_digest: str


class Receipt(msgspec.Struct, frozen=True):
    """What a rank reports when its files are durable: the file records by folder, and what it saw of shared values."""

    rank: int
    save_id: str
    files: dict[str, FileRecord]
    replica_digests: dict[str, str] = {}


class Parent(msgspec.Struct, frozen=True):
    """The step a run was restored from. ``run`` differs from the run's own when it came from another root."""

    run: str
    incarnation: int
    step: int


class Lineage(msgspec.Struct, frozen=True):
    """Which run wrote the step, in which start of the job, and from which step that start came.

    ``exclusive`` says whether the storage it was committed to gave a name to one writer only; UNSET before format 1.2.
    """

    run: str
    incarnation: int = 0
    parent: Parent | None = None
    exclusive: bool | msgspec.UnsetType = msgspec.UNSET


class Component(msgspec.Struct, frozen=True, omit_defaults=True):
    """A top-level part of the state: its kind, the type it had, how many tensors and bytes, and their folder.

    ``left_out`` are patterns of keys that were not saved because the run did not want them to be; ``left_out_from`` marks
    their values, where the run got them from a step.
    """

    kind: str
    type: str
    tensors: int
    bytes: int
    folder: str
    left_out: tuple[str, ...] = ()
    left_out_from: str = ""


class Versions(msgspec.Struct, frozen=True):
    """What wrote the step. ``cpu`` is the vector class of the processor; ``code`` the user's code revision, if known."""

    keepstep: str
    torch: str
    python: str
    cpu: str = ""
    code: str = ""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """See the module's text. ``tensors`` is in the order of the state; ``aliases`` maps a tied key to where it is stored.

    The fields down to ``dropped`` are the head: they come first in the file and say which step this is. A metric that is
    not a finite number (a loss that diverged) is null in JSON, and None when it is read back. ``config`` is what the run
    said of its configuration: JSON of any shape, for people and their tools. A load compares it and gives nothing back.
    ``dropped`` names components whose files have been let go since: each lay in a folder of its own name. Where there are
    none, the field is not written.
    """

    format: tuple[int, int]
    step: int
    save_id: str
    created: str
    lineage: Lineage
    metrics: dict[str, float | None] = {}
    dropped: tuple[str, ...] = ()
    world_size: int
    versions: Versions
    config: msgspec.Raw = msgspec.Raw(b"null")
    fingerprint: str = ""
    components: dict[str, Component]
    aliases: dict[str, str] = {}
    meshes: tuple[Mesh, ...]
    layouts: tuple[Layout, ...]
    tensors: tuple[TensorSpec, ...]
    files: dict[str, tuple[FileRecord, ...]]

    @property
    def structure(self) -> Structure:
        """The stored structure: every element held by exactly one rank."""
        return Structure(self.meshes, self.layouts, self.tensors)

    def file_name(self, folder: str, rank: int) -> str:
        """The name of a shard file below the step's folder."""
        return file_name(folder, rank, self.save_id)

    @property
    def total_bytes(self) -> int:
        """The sum of the sizes of all shard files."""
        return sum(record.size_bytes for records in self.files.values() for record in records)


_FIELDS = Manifest.__struct_fields__


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The first fields of a manifest: enough to know which step it is, without proof that the rest is good."""

    format: tuple[int, int]
    step: int
    save_id: str
    created: str
    lineage: Lineage
    metrics: dict[str, float | None] = {}
    dropped: tuple[str, ...] = ()


class _Version(msgspec.Struct):
    format: tuple[int, int]


HEAD_BYTES = 1 << 14
_HEAD_END = b',\n"world_size": '


def step_name(step: int) -> str:
    """The folder of a step below its root: ``step-00001200``."""
    return f"step-{step:08d}"


def parse_step_name(name: str) -> int | None:
    """The step of a folder name, or None for anything that is not exactly a step's folder."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and name == step_name(int(match[1])) else None


def file_name(folder: str, rank: int, save_id: str) -> str:
    """``<folder>/rank-<r>.<save id>.safetensors``, relative to the step."""
    return f"{folder}/rank-{rank:05d}.{save_id}.safetensors"


def safe_folder(name: str) -> bool:
    """Whether a component's name may be the name of a folder."""
    return _FOLDER.fullmatch(name) is not None


def pack_manifest(manifest: Manifest) -> bytes:
    """The manifest as JSON, one top-level field a line, with its digest as the last field."""
    fields = [name for name in _FIELDS if name != "dropped" or manifest.dropped]
    lines = [b'"%s": %s' % (name.encode(), msgspec.json.encode(getattr(manifest, name))) for name in fields]
    text = b"{\n" + b",\n".join(lines)
    return text + b',\n"digest": "%016x"\n}\n' % digest(text)


def parse_head(data: bytes, name: str) -> Head:
    """The head of a manifest from its first ``HEAD_BYTES`` bytes, or from all of it.

    Raises:
        FormatError: a newer major version of the format.
        CorruptError: not the beginning of a manifest.
    """
    text, mark, _ = data.partition(_HEAD_END)
    try:
        version = msgspec.json.decode(text + b"}", type=_Version) if mark else msgspec.json.decode(data, type=_Version)
        _check_version(version.format, name)
        return msgspec.json.decode(text + b"}", type=Head)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
        raise CorruptError(f"{name}: not a manifest: {err}") from err


def _check_version(version: tuple[int, int], name: str) -> None:
    if version[0] != FORMAT_MAJOR:
        raise FormatError(
            f"{name}: written in format {version[0]}.{version[1]}; this keepstep reads format {FORMAT_MAJOR}."
            " Nothing was read or changed"
        )


def parse_manifest(data: bytes, name: str) -> Manifest:
    """Reads a manifest and proves that its parts fit each other; nothing is allocated by its numbers.

    Args:
        data: the bytes of the manifest.
        name: where it came from, for messages.

    Raises:
        FormatError: a newer major version of the format.
        CorruptError: not a manifest, a wrong digest, or numbers that cannot be true.
    """
    try:
        version = msgspec.json.decode(data, type=_Version)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
        raise CorruptError(f"{name}: not a manifest: {err}") from err
    _check_version(version.format, name)
    text, mark, tail = data.rpartition(b',\n"digest": "')
    if not mark or tail != b'%016x"\n}\n' % digest(text):
        raise CorruptError(f"{name}: the manifest does not match its own digest")
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
        raise CorruptError(f"{name}: not a manifest: {err}") from err
    problem = _contradiction(manifest)
    if problem:
        raise CorruptError(f"{name}: {problem}")
    return manifest


def proves_itself(data: bytes) -> bool:
    """Whether the bytes of a manifest match the digest in them."""
    text, mark, tail = data.rpartition(b',\n"digest": "')
    return bool(mark) and tail == b'%016x"\n}\n' % digest(text)


def _contradiction(manifest: Manifest) -> str | None:
    """The first thing in a manifest that cannot be true, or None."""
    world = manifest.world_size
    if not 0 < world <= MAX_WORLD or manifest.step < 0:
        return f"world size {world} or step {manifest.step} is not possible"
    if not _SAVE_ID.fullmatch(manifest.save_id):
        return f"save id {manifest.save_id!r} is not a save id"
    for mesh in manifest.meshes:
        size = math.prod(mesh.shape)
        ranks = mesh.ranks if mesh.ranks is not None else (mesh.first, mesh.first + size - 1)
        if not mesh.shape or any(n < 1 for n in mesh.shape) or any(not 0 <= rank < world for rank in ranks):
            return f"a mesh of shape {mesh.shape} does not fit {world} ranks"
        if mesh.ranks is not None and not len(mesh.ranks) == len(set(mesh.ranks)) == size:
            return f"a mesh of shape {mesh.shape} lists {len(mesh.ranks)} ranks"
    for layout in manifest.layouts:
        if len(layout.shape) > MAX_DIMENSIONS or any(size < 0 for size in layout.shape):
            return f"a tensor of shape {layout.shape} is not possible"
        if math.prod(max(size, 1) for size in layout.shape) > MAX_ELEMENTS:
            return f"a tensor of shape {layout.shape} is not possible"
        if any(not 0 <= rank < world or not box.inside(layout.shape) for rank, box in layout.boxes or ()):
            return f"a box lies outside its tensor of shape {layout.shape}, or on a rank that is not there"
        if not 0 <= layout.mesh < len(manifest.meshes):
            return f"a layout names mesh {layout.mesh}, which is not there"
        problem = _bad_cuts(layout, manifest.meshes[layout.mesh]) if layout.boxes is None else None
        if problem:
            return problem
    return _bad_tensors(manifest)


def _bad_cuts(layout: Layout, mesh: Mesh) -> str | None:
    for cut in layout.cuts:
        known = cut.kind in ("S", "SS", "B", "O") and 0 <= cut.axis < len(mesh.shape)
        if not known or (cut.kind != "O" and not 0 <= cut.dim < len(layout.shape)):
            return f"a layout has the impossible cut {cut}"
        limit = MAX_WORLD if cut.kind == "SS" else mesh.shape[cut.axis] - 1
        if cut.kind in ("SS", "O") and not (cut.kind == "SS") <= cut.arg <= limit:
            return f"a layout has the impossible cut {cut}"
    return None


def _bad_tensors(manifest: Manifest) -> str | None:
    for name in manifest.dropped:
        if name not in manifest.components or name in manifest.files or not safe_folder(name):
            return f"{name!r} cannot have been dropped: it is no component, or its files are listed"
    for folder, records in manifest.files.items():
        if not _FOLDER.fullmatch(folder) or len({record.rank for record in records}) != len(records):
            return f"{folder!r} is not a folder name, or lists a rank twice"
        for record in records:
            if not 0 <= record.rank < manifest.world_size or not 0 <= record.data_bytes <= record.size_bytes:
                return f"{folder!r} has an impossible file record {record}"
    for spec in manifest.tensors:
        if spec.dtype not in ITEM_BYTES or not 0 <= spec.layout < len(manifest.layouts):
            return f"{spec.key!r} has the unknown dtype {spec.dtype!r} or layout {spec.layout}"
        if spec.folder not in manifest.files:
            return f"{spec.key!r} lies in {spec.folder!r}, which has no files"
    keys = {spec.key for spec in manifest.tensors}
    if len(keys) != len(manifest.tensors) or not keys.isdisjoint(manifest.aliases):
        return "a key is stored twice"
    return None


def promised_files(manifest: Manifest) -> dict[str, int]:
    """Name and size in bytes of every shard file, once it is proved that together they can hold every tensor.

    Proved is that each element belongs to exactly one rank, and that the tensors are as large as the data of the files.
    So whoever makes memory for a tensor of this manifest is asked for no more than lies in the files.

    Raises:
        CorruptError: a hole or an overlap, a tie to nothing, or sizes that do not fit; names the first it concerns.
    """
    keys = {spec.key for spec in manifest.tensors}
    for key, stored in manifest.aliases.items():
        if stored not in keys:
            raise CorruptError(f"{key!r} is tied to {stored!r}, which is not stored")
    rest = {folder: sum(record.data_bytes for record in records) for folder, records in manifest.files.items()}
    elements = [math.prod(layout.shape) for layout in manifest.layouts]
    proved: set[int] = set()
    for spec in manifest.tensors:
        rest[spec.folder] -= elements[spec.layout] * ITEM_BYTES[spec.dtype]
        if spec.layout in proved:
            continue
        proved.add(spec.layout)
        layout, mesh = manifest.layouts[spec.layout], manifest.meshes[manifest.layouts[spec.layout].mesh]
        used = [cut.axis for cut in layout.cuts]
        if layout.boxes is not None:
            check_partition(spec.key, layout.shape, [box for _, box in layout.boxes])
        elif len(used) != len(set(used)) or any(n > 1 and axis not in used for axis, n in enumerate(mesh.shape)):
            raise CorruptError(
                f"{spec.key!r}: cuts along {used} of a mesh of shape {mesh.shape} do not give every element to one rank"
            )
    for folder, left in rest.items():
        # The state file also holds plain values.
        if left < 0 or (left > 0 and folder != STATE_FOLDER):
            raise CorruptError(
                f"the files in {folder!r} hold {abs(left):,} bytes {'less' if left < 0 else 'more'} than its tensors have"
            )
    return {
        file_name(folder, record.rank, manifest.save_id): record.size_bytes
        for folder, records in manifest.files.items()
        for record in records
    }
