"""What a load knows of its origin before it binds, and what it says of each component after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ComponentReport", "Origin"]


@dataclass(slots=True)
class ComponentReport:
    """What became of one component: counts of tensors and values, and the keys that were left out or made anew.

    ``conversions`` counts the ``cast`` ones by their dtypes: ``{"float32 as bfloat16": 12}``. ``noted`` is what else a
    person should know, such as whether the disk holds the attached files that the step holds.
    """

    restored: int = 0
    cast: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    reset: list[str] = field(default_factory=list)
    rederived: list[str] = field(default_factory=list)
    skipped: bool = False
    noted: list[str] = field(default_factory=list)
    overridden: list[str] = field(default_factory=list)
    resized: list[str] = field(default_factory=list)
    conversions: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a checkpoint comes from, as far as binding needs to know: its step, world, ties, and this rank's own values."""

    world: int
    aliases: Mapping[str, str]
    own: Mapping[str, Any]
    step: int = 0
