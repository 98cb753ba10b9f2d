"""A committed step at rest: is everything there that its manifest promises, and is it what was written?

In: the storage of one step. Out: a ``Verified``, again and again while the bytes are read; the last one is the result.
Finds every fault instead of stopping at the first one. Changes nothing, imports no torch, and needs no class of the user's.

    manifest    its digest, and that its layouts give every element of every tensor to exactly one rank
    files       there, of the right size, with the header that was committed
    entries     in every file the pieces that the layouts give to its rank: none missing, none surplus, none different
    blocks      every byte of data against its digest, on a few threads
    values      the plain values can be decoded, and what they refer to is there

What lies in the step's folder besides is no fault of the step; it is told as ``strays``.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from keepstep.check.blocks import compared_chunks
from keepstep.check.values import Outline, outline
from keepstep.commit.catalog import read_manifest
from keepstep.commit.transfer import read_header
from keepstep.errors import CheckpointError, CorruptError, FormatError, StepNotFoundError, StorageError, listed
from keepstep.format.box import check_partition, whole
from keepstep.format.layout import Part, parts
from keepstep.format.manifest import (
    MANIFEST_NAME,
    OWN_NAME,
    STATE_FOLDER,
    TREE_NAME,
    FileRecord,
    Manifest,
    pack_manifest,
    parse_head,
)
from keepstep.format.shardfile import Entry, ShardHeader, digest, manifest_copy, parse_header
from keepstep.plan.save_plan import expected_bytes
from keepstep.storage.base import Blob, Storage

__all__ = ["KINDS", "Problem", "Verified", "exit_status", "verify", "verify_files"]

SHOWN_PIECES = 5

KINDS: dict[str, type[CheckpointError]] = {
    "manifest": CorruptError,
    "coverage": CorruptError,
    "missing": CorruptError,
    "size": CorruptError,
    "header": CorruptError,
    "entries": CorruptError,
    "blocks": CorruptError,
    "values": CorruptError,
    "lost": CorruptError,
    "lineage": CorruptError,
    "incarnation": CorruptError,
    "run": CorruptError,
    "latest": CorruptError,
    "unreadable": StorageError,
    "version": FormatError,
}
"""Every kind of problem, the worst first, and the error whose exit status it has. Damage that is proved is worse than a
file that could not be read, and that is worse than a version that this keepstep does not know. From ``lost`` to ``latest``
they are those of a run and its records; see ``keepstep.check.run``."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault: its kind (see ``KINDS``), the file it is in, relative to the step, and what was found and expected."""

    kind: str
    file: str
    text: str


@dataclass(frozen=True, slots=True)
class Verified:
    """What is known about a step so far. ``step`` is None when the manifest cannot be read.

    ``bytes`` and ``blocks`` count data that was read and compared, out of ``total_bytes``; ``files`` the files begun.
    ``strays`` are names in the step's folder that the manifest does not list.
    """

    step: int | None
    files: int = 0
    bytes: int = 0
    blocks: int = 0
    total_bytes: int = 0
    problems: tuple[Problem, ...] = ()
    strays: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong, as far as was looked."""
        return not self.problems


def exit_status(problems: tuple[Problem, ...]) -> int:
    """0 without problems, else the exit status that belongs to the worst kind among them."""
    found = {problem.kind for problem in problems}
    return next((error.exit_status for kind, error in KINDS.items() if kind in found), 0)


def verify(storage: Storage) -> Iterator[Verified]:
    """Verifies one committed step; yields what is known after each part of the work. The last one is the result.

    Not collective; any thread. Reads every byte of the step once and holds a few MiB at a time.

    Args:
        storage: the step's own storage.

    Raises:
        StepNotFoundError: no step is committed there, or it was removed or replaced meanwhile.
        StorageError: the manifest or the folder cannot be read.
    """
    try:
        manifest = read_manifest(storage)
    except (CorruptError, FormatError) as err:
        kind = "version" if isinstance(err, FormatError) else "manifest"
        yield Verified(None, problems=(Problem(kind, MANIFEST_NAME, str(err)),))
        return
    except StorageError as err:
        if err.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
        raise StepNotFoundError(f"{storage.url}: no committed step; there is no manifest ({MANIFEST_NAME})") from err
    for verified in verify_files(storage, manifest):
        yield verified
    if not verified.ok:
        _still_there(storage, manifest)


def verify_files(storage: Storage, manifest: Manifest) -> Iterator[Verified]:
    """Verifies the files of a step against a manifest, whether it has been committed or not; see ``verify``.

    Raises:
        StorageError: the folder cannot be read.
    """
    work = _Work(storage, manifest)
    so_far = Verified(manifest.step, total_bytes=sum(r.data_bytes for rs in manifest.files.values() for r in rs))
    so_far = replace(so_far, problems=(*_uncovered(manifest), *_unlisted(manifest)))
    there = dict(storage.list(""))
    promised = {manifest.file_name(folder, one.rank) for folder, records in manifest.files.items() for one in records}
    so_far = replace(so_far, strays=tuple(sorted(there.keys() - promised - {MANIFEST_NAME})))
    for folder, records in manifest.files.items():
        for record in records:
            so_far = replace(so_far, files=so_far.files + 1)
            for checked in work.file(folder, record, there):
                so_far = _added(so_far, checked)
                yield so_far
    yield replace(so_far, problems=(*so_far.problems, *work.loose_references()))


@dataclass(frozen=True, slots=True)
class _Checked:
    """A part of the work that is done."""

    bytes: int = 0
    blocks: int = 0
    problems: tuple[Problem, ...] = ()


def _added(so_far: Verified, checked: _Checked) -> Verified:
    return replace(
        so_far,
        bytes=so_far.bytes + checked.bytes,
        blocks=so_far.blocks + checked.blocks,
        problems=(*so_far.problems, *checked.problems) if checked.problems else so_far.problems,
    )


def _uncovered(manifest: Manifest) -> Iterator[Problem]:
    """Layouts that leave a hole or an overlap. Each is checked once, for all the tensors that share it."""
    first: dict[int, str] = {}
    for spec in manifest.tensors:
        first.setdefault(spec.layout, spec.key)
    meshes = list(manifest.meshes)
    for index, key in first.items():
        layout = manifest.layouts[index]
        if layout.boxes is not None:
            boxes = [box for _, box in layout.boxes]
        else:
            ranks = meshes[layout.mesh].members()
            boxes = [part.box for rank in ranks for part in parts(layout, meshes, rank)]
        try:
            check_partition(key, layout.shape, boxes)
        except CorruptError as err:
            sharing = sum(1 for spec in manifest.tensors if spec.layout == index) - 1
            more = f"; {sharing} more tensors share this layout" if sharing else ""
            yield Problem("coverage", MANIFEST_NAME, f"{err}{more}")


def _unlisted(manifest: Manifest) -> Iterator[Problem]:
    """Ranks that hold pieces by the layouts, but have no file; keys that are tied to nothing."""
    stored_keys = {spec.key for spec in manifest.tensors}
    for key, stored in manifest.aliases.items():
        if stored not in stored_keys:
            yield Problem("coverage", MANIFEST_NAME, f"{key!r} is tied to {stored!r}, which is not stored")
    for folder, expected in expected_bytes(manifest.structure, manifest.world_size).items():
        listed_ranks = {record.rank for record in manifest.files[folder]}
        for rank, wanted in enumerate(expected.tolist()):
            if wanted and rank not in listed_ranks:
                text = (
                    f"the manifest lists no file of rank {rank} in {folder!r}, which holds {wanted:,} bytes of tensors"
                )
                yield Problem("missing", manifest.file_name(folder, rank), text)
    if not any(record.rank == 0 for record in manifest.files.get(STATE_FOLDER, ())):
        text = "the manifest lists no file of rank 0 in 'state', which holds the plain values"
        yield Problem("missing", manifest.file_name(STATE_FOLDER, 0), text)


def _still_there(storage: Storage, manifest: Manifest) -> None:
    """A step that retention took, or a later save replaced, while it was read is not a damaged one."""
    try:
        now = read_manifest(storage).save_id
    except CheckpointError:
        now = ""
    if now != manifest.save_id:
        raise StepNotFoundError(f"{storage.url}: step {manifest.step} was removed or replaced while it was verified")


@dataclass(slots=True)
class _Work:
    """The files of one step, one after another, and what their plain values refer to."""

    storage: Storage
    manifest: Manifest
    shared: Outline | None = None
    own_keys: dict[str, set[int]] = field(default_factory=dict)
    _parts: dict[tuple[int, int], list[Part]] = field(default_factory=dict)

    def file(self, folder: str, record: FileRecord, there: dict[str, int]) -> Iterator[_Checked]:
        """Everything about one file."""
        name = self.manifest.file_name(folder, record.rank)
        size = there.get(name)
        if size is None:
            yield _Checked(problems=(Problem("missing", name, f"{name} is missing"),))
        elif size != record.size_bytes:
            text = f"{name} has {size:,} bytes; {record.size_bytes:,} were written"
            yield _Checked(problems=(Problem("size", name, text),))
        else:
            try:
                with self.storage.open(name) as blob:
                    yield from self._opened(blob, name, folder, record)
            except (StorageError, CorruptError) as err:
                kind = "unreadable" if isinstance(err, StorageError) else "header"
                yield _Checked(problems=(Problem(kind, name, str(err)),))

    def loose_references(self) -> Iterator[Problem]:
        """Tensors and values that the plain values name and that are stored nowhere."""
        if self.shared is None:
            return
        name = self.manifest.file_name(STATE_FOLDER, 0)
        stored = {spec.key: spec for spec in self.manifest.tensors}
        problems = []
        for ref in self.shared.tensors:
            spec = stored.get(self.manifest.aliases.get(ref.key, ref.key))
            if ref.own or (spec is None and ref.key.partition("/")[0] in self.manifest.dropped):
                continue
            if spec is None:
                problems.append(f"{ref.key!r} is stored nowhere")
            elif (spec.dtype, self.manifest.layouts[spec.layout].shape) != (ref.dtype, ref.shape):
                shape = list(self.manifest.layouts[spec.layout].shape)
                problems.append(f"{ref.key!r} is {spec.dtype} {shape}, expected {ref.dtype} {list(ref.shape)}")
        for own in self.shared.per_rank:
            there = self.own_keys.get(own.key, set())
            if not there:
                problems.append(f"{own.key!r} has no value on any rank")
            elif lacking := sorted(set(own.owners or range(self.manifest.world_size)) - there):
                problems.append(f"{own.key!r} has no value on rank {', '.join(map(str, lacking))}")
        missing = [part for part in self.manifest.components if part not in self.shared.names]
        problems.extend(f"component {part!r} has no plain values" for part in missing)
        if problems:
            yield Problem("values", name, "the plain values name what is not there:" + listed(problems, SHOWN_PIECES))

    def _opened(self, blob: Blob, name: str, folder: str, record: FileRecord) -> Iterator[_Checked]:
        raw = read_header(blob, name)
        if f"{digest(raw):016x}" != record.header_digest:
            raise CorruptError(f"{name}: the header is not the one that was committed (its digest differs)")
        header = parse_header(raw, blob.size_bytes, name)
        origin = (header.save_id, header.step, header.rank)
        if origin != (self.manifest.save_id, self.manifest.step, record.rank):
            raise CorruptError(f"{name}: belongs to attempt {origin[0]}, step {origin[1]}, rank {origin[2]}")
        self._compare_copy(raw, name)
        if header.data_bytes != record.data_bytes:
            raise CorruptError(f"{name}: {header.data_bytes:,} bytes of data; {record.data_bytes:,} were written")
        bad: list[int] = []
        for chunk in compared_chunks(blob, header):
            bad.extend(chunk.bad)
            yield _Checked(chunk.bytes, chunk.blocks)
        if bad:
            yield _Checked(problems=(Problem("blocks", name, _bad_text(name, header, bad)),))
            yield _Checked(problems=self._entries(header, name, folder, own=None))
            return
        own: Outline | None = Outline((), (), ())
        if folder == STATE_FOLDER:
            try:
                own = self._values(blob, header, name)
            except CorruptError as err:
                own = None
                yield _Checked(problems=(Problem("values", name, str(err)),))
        yield _Checked(problems=self._entries(header, name, folder, own=own))

    def _compare_copy(self, raw: bytes, name: str) -> None:
        """What the file says of the attempt it belongs to, where it has a copy of the manifest."""
        copy = manifest_copy(raw, name)
        if copy:
            mine, theirs = (
                parse_head(pack_manifest(self.manifest), "the manifest"),
                parse_head(copy, f"{name}: the copy"),
            )
            for part in ("step", "save_id", "created", "lineage", "metrics"):
                if getattr(mine, part) != getattr(theirs, part):
                    text = f"{part} {getattr(theirs, part)} where the manifest has {getattr(mine, part)}"
                    raise CorruptError(f"{name}: its copy of the manifest is of another one: {text}")

    def _values(self, blob: Blob, header: ShardHeader, name: str) -> Outline:
        """The rank's own plain values; notes the shared ones of rank 0, which it needs to have."""
        trees = {}
        for entry in header.entries:
            if entry.name in (TREE_NAME, OWN_NAME):
                raw = bytearray(entry.stop - entry.start)
                if raw:
                    blob.read_into(header.data_offset + entry.start, memoryview(raw))
                trees[entry.name] = outline(bytes(raw), f"{name}: {entry.name}")
        if header.rank == 0:
            self.shared = trees.get(TREE_NAME)
        own = trees.get(OWN_NAME, Outline((), (), ()))
        for key in own.names:
            self.own_keys.setdefault(key, set()).add(header.rank)
        return own

    def _entries(self, header: ShardHeader, name: str, folder: str, *, own: Outline | None) -> tuple[Problem, ...]:
        """What a file holds against what the layouts give to its rank. ``own`` is None when values cannot be trusted."""
        expected = {entry.name: entry for entry in self._expected(folder, header.rank)}
        if folder == STATE_FOLDER and header.rank == 0:
            expected[TREE_NAME] = _any_size(header, TREE_NAME)
        for ref in own.tensors if own is not None else ():
            expected[ref.key] = Entry(ref.key, ref.key, ref.dtype, ref.shape, whole(ref.shape), 0, 0)
        surplus = (
            [] if own is None else [e.name for e in header.entries if e.name not in expected and e.name != OWN_NAME]
        )
        found = {entry.name: entry for entry in header.entries}
        lines = [f"the piece {piece!r} is missing" for piece in expected if piece not in found]
        lines.extend(f"{piece!r} is there, but the manifest gives it to no file of this rank" for piece in surplus)
        for piece, wanted in expected.items():
            entry = found.get(piece)
            if entry is not None and _what(entry) != _what(wanted):
                lines.append(f"{piece!r} holds {_what(entry)}, expected {_what(wanted)}")
        if not lines:
            return ()
        return (Problem("entries", name, f"{name} does not hold what it should:" + listed(lines, SHOWN_PIECES)),)

    def _expected(self, folder: str, rank: int) -> Iterator[Entry]:
        meshes = list(self.manifest.meshes)
        for spec in self.manifest.tensors:
            if spec.folder != folder:
                continue
            layout = self.manifest.layouts[spec.layout]
            held = self._parts.get((spec.layout, rank))
            if held is None:
                held = self._parts[spec.layout, rank] = parts(layout, meshes, rank)
            for part in held:
                name = spec.key if part.box.sizes == layout.shape else f"{spec.key}~{part.box}"
                yield Entry(name, spec.key, spec.dtype, layout.shape, part.box, 0, 0)


def _bad_text(name: str, header: ShardHeader, bad: list[int]) -> str:
    """How many blocks, where the first is, and whose bytes they hold."""
    hit = []
    for entry in header.entries:
        if entry.stop > entry.start:
            first, last = entry.start // header.block_bytes, (entry.stop - 1) // header.block_bytes
            if any(first <= block <= last for block in bad):
                hit.append(repr(entry.name))
    at = header.data_offset + bad[0] * header.block_bytes
    blocks = f"{len(bad):,} of {len(header.digests):,} blocks do not match their digests"
    more = f" and {len(hit) - SHOWN_PIECES} more" if len(hit) > SHOWN_PIECES else ""
    return f"{name}: {blocks}, the first at byte {at:,}; they hold bytes of {', '.join(hit[:SHOWN_PIECES])}{more}"


def _any_size(header: ShardHeader, name: str) -> Entry:
    """The entry for a tree, whose length the manifest does not know."""
    size = next((entry.stop - entry.start for entry in header.entries if entry.name == name), 0)
    return Entry(name, name, "uint8", (size,), whole((size,)), 0, size)


def _what(entry: Entry) -> str:
    return f"{entry.dtype} {entry.box} of {entry.key!r} {list(entry.shape)}"
