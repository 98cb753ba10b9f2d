"""What a run was made with, for the record: its configuration and the revision of its code. Never given back."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import functools
import math
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import msgspec

from keepstep.errors import UsageError

__all__ = ["NO_CONFIG", "code_revision", "config_record", "differences"]

NO_CONFIG = b"null"
MAX_CONFIG_BYTES = 1 << 16
MAX_DEPTH = 32
GIT_LIMIT_S = 2.0
SHOWN = 10
_COMMIT = re.compile(r"[0-9a-f]{40,64}")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def config_record(config: Any) -> bytes:
    """A configuration as JSON. What JSON has no form for is written as text.

    Args:
        config: any plain value, a mapping, a dataclass, or an argparse.Namespace.

    Raises:
        UsageError: more than 64 KiB; names the largest entries.
    """
    plain = _plain(config, 0)
    record = msgspec.json.encode(plain)
    if len(record) > MAX_CONFIG_BYTES:
        parts = plain.items() if isinstance(plain, dict) else ()
        sizes = sorted(((len(msgspec.json.encode(value)), key) for key, value in parts), reverse=True)[:3]
        largest = ", ".join(f"{key} ({size:,})" for size, key in sizes) or "it is one value"
        raise UsageError(
            f"config= has {len(record):,} bytes as JSON; each step's manifest holds it, and {MAX_CONFIG_BYTES:,} are the"
            f" limit. Largest: {largest}. Attach what is large with files="
        )
    return record


def code_revision() -> str:
    """The commit of the repository that holds the main script, with ``-dirty`` when tracked files differ from it.

    Asked for once in a process; empty where there is no script, no repository, no git, or no answer within 2 s.
    """
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    return _revision_at(str(Path(script).resolve().parent)) if script else ""


def differences(saved: bytes, now: bytes) -> list[str]:
    """What differs between two configurations, entry by entry: ``optimizer.lr: 0.1 when saved, 0.2 now``."""
    then, here = (dict(_flat(msgspec.json.decode(raw), "")) for raw in (saved, now))
    notes = [
        f"{key}: {_word(then, key)} when saved, {_word(here, key)} now"
        for key in dict.fromkeys([*then, *here])
        if key not in then or key not in here or then[key] != here[key]
    ]
    return [*notes[:SHOWN], f"and {len(notes) - SHOWN} more"] if len(notes) > SHOWN else notes


@functools.cache
def _revision_at(folder: str) -> str:
    # One question for both, by which git does not write to a repository that is only looked at.
    asked = ["git", "--no-optional-locks", "-C", folder, "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        ran = subprocess.run(
            asked, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=GIT_LIMIT_S, check=False
        )
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return ""
    lines = ran.stdout.splitlines() if ran.returncode == 0 else []
    commit = next((line.rpartition(" ")[2] for line in lines if line.startswith("# branch.oid ")), "")
    if not _COMMIT.fullmatch(commit):
        return ""
    return f"{commit}-dirty" if any(not line.startswith("# ") for line in lines) else commit


def _plain(value: Any, depth: int) -> Any:
    """The value in the words of JSON: the same for the same configuration in every process."""
    if value is None or type(value) in (bool, str):
        return value if value is None or type(value) is bool else value.encode(errors="replace").decode()
    if depth > MAX_DEPTH:
        return "…"
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, int):
        return int(value) if -(1 << 63) <= value < (1 << 63) else str(int(value))
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {_key(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview):
        return [_plain(item, depth + 1) for item in value]
    if isinstance(value, Set):
        return sorted((_plain(item, depth + 1) for item in value), key=repr)
    if isinstance(value, str | Path):
        return str(value).encode(errors="replace").decode()
    named = getattr(value, "__qualname__", None)
    text = (
        f"{value.__module__}.{named}"
        if isinstance(named, str)
        else _ADDRESS.sub("", repr(value) if isinstance(value, bytes | bytearray) else str(value))
    )
    return text.encode(errors="replace").decode()


def _key(key: Any) -> str:
    plain = _plain(key, 0)
    return plain if isinstance(plain, str) else msgspec.json.encode(plain).decode()


def _flat(value: Any, path: str, depth: int = 0) -> list[tuple[str, Any]]:
    # Deeper than anything that was written here: a record that somebody else made.
    if isinstance(value, dict) and value and depth <= MAX_DEPTH:
        found = (_flat(item, f"{path}.{key}" if path else key, depth + 1) for key, item in value.items())
        return [entry for entries in found for entry in entries]
    return [(path or "config", value)] if path or value not in (None, {}) else []


def _word(entries: dict[str, Any], key: str) -> str:
    if key not in entries:
        return "absent"
    text = msgspec.json.encode(entries[key]).decode()
    return text if len(text) <= 60 else f"{text[:59]}…"
