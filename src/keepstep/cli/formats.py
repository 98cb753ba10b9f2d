"""What is at a path, whichever program has saved it: a step, DCP's directory, safetensors, or a file of ``torch.save``.

Whatever is not a step is shown as one; only then is torch imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from keepstep.cli.places import folder_at, has_blob, step_at
from keepstep.cli.words import safe
from keepstep.commit.catalog import MAX_MANIFEST_BYTES
from keepstep.errors import StepNotFoundError, UsageError
from keepstep.foreign.kinds import ARCHIVE, FOREIGN, SAFETENSORS, find_foreign
from keepstep.format.manifest import MANIFEST_NAME, Manifest, parse_manifest
from keepstep.storage.base import Storage, read_blob

__all__ = ["FORMATS", "FORMAT_WORDS", "Found", "found_at"]

FORMATS = ("keepstep", "dcp", "torch")
"""What can be written as a whole; safetensors hold models alone."""
FORMAT_WORDS = {
    "keepstep": "a step",
    "dcp": "a directory of torch's DCP",
    "safetensors": "safetensors",
    "torch": "a file of torch.save",
}
SHOWN = 3
_FILES = (".pt", ".pth", ".bin", ".ckpt")


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint in one of ``FORMAT_WORDS``, as a step that everything reads which reads steps."""

    format: str
    step: Storage
    manifest: Manifest


def found_at(path: str, only: Sequence[str] = ()) -> Found:
    """The checkpoint at a path or URL, whichever format it has; ``only`` are the components wanted of a foreign one.

    Raises:
        UsageError, StepNotFoundError: there is none; says what is there instead.
        CorruptError, FormatError, UnsafeValueError, StorageError: it is damaged, newer, not plain, or cannot be read.
    """
    file = Path(path).expanduser()
    if "://" not in path and file.is_file():
        return _in_file(file, only)
    place = folder_at(path)
    raw = read_blob(place, MANIFEST_NAME, MAX_MANIFEST_BYTES) if has_blob(place, MANIFEST_NAME) else find_foreign(place)
    if raw == SAFETENSORS:
        from keepstep.foreign.safetensors.step import show_folder

        shown = show_folder(place)
        return Found("safetensors", shown, shown.manifest)
    if raw.startswith(FOREIGN):
        from keepstep.foreign.dcp.step import show_directory

        shown = show_directory(place, raw, only)
        return Found("dcp", shown, shown.manifest)
    if raw:
        return Found("keepstep", place, parse_manifest(raw, f"{place.url}/{MANIFEST_NAME}"))
    names = [name for name, _ in place.list("")]
    files = [name for name in names if name.endswith(_FILES) and "/" not in name]
    if files:
        some = ", ".join(safe(name) for name in sorted(files)[:SHOWN])
        raise StepNotFoundError(f"{place.url} is not a checkpoint but holds files that may be some; name one: {some}")
    step = step_at(path)
    return Found("keepstep", step, parse_manifest(read_blob(step, MANIFEST_NAME, MAX_MANIFEST_BYTES), step.url))


def _in_file(file: Path, only: Sequence[str]) -> Found:
    if file.suffix == ".safetensors":
        from keepstep.foreign.safetensors.step import show_folder

        shown = show_folder(folder_at(str(file.parent)), file=file.name)
        return Found("safetensors", shown, shown.manifest)
    if file.name == MANIFEST_NAME:
        return found_at(str(file.parent), only)
    with file.open("rb") as opened:
        if not opened.read(len(ARCHIVE)).startswith((ARCHIVE, FOREIGN)):
            raise UsageError(f"{str(file)!r} is a file, not a folder, and none of torch.save or safetensors")
    from keepstep.interop.torch_save import show_file

    shown = show_file(file, only=only)
    return Found("torch", shown, shown.manifest)
