"""Classes that a user allows in a state. The one table of the process: a class is registered where it is defined."""

from __future__ import annotations

import dataclasses
import io
from enum import Enum

from keepstep.errors import UsageError

__all__ = ["can_register", "register", "registered_class", "registered_name"]


class _File:
    """Reads a file in memory: its bytes, and where it stood."""

    @staticmethod
    def from_state(state: tuple[bytes, int]) -> io.BytesIO:
        """The file."""
        file = io.BytesIO(state[0])
        file.seek(state[1])
        return file


_CLASSES: dict[str, type] = {"io.BytesIO": _File}


def register(cls: type, *, name: str | None = None) -> type:
    """Allows a dataclass, an Enum, or a class with ``to_state``/``from_state`` in a state. Usable as a decorator.

    Args:
        cls: the class. A plain class needs ``to_state(self) -> plain value`` and ``from_state(value)`` (classmethod).
        name: the stable name in the file; the class's own qualified name when None.

    Raises:
        UsageError: the class fits none of these, or the name belongs to another class.
    """
    fits = dataclasses.is_dataclass(cls) or issubclass(cls, Enum)
    if not fits and not (hasattr(cls, "to_state") and hasattr(cls, "from_state")):
        raise UsageError(f"{cls.__qualname__} is no dataclass or Enum and has no to_state/from_state")
    known = name or f"{cls.__module__}.{cls.__qualname__}"
    other = _CLASSES.get(known)
    if other is not None and other is not cls and other.__qualname__ != cls.__qualname__:
        raise UsageError(f"the name {known!r} is already registered for {other.__qualname__}")
    _CLASSES[known] = cls
    return cls


def registered_class(name: str) -> type | None:
    """The class registered under that name, or None."""
    return _CLASSES.get(name)


def registered_name(cls: type) -> str | None:
    """The name of a registered class, or None."""
    return next((name for name, known in _CLASSES.items() if known is cls), None)


def can_register(cls: type) -> bool:
    """Whether ``register`` would take the class, so that an error can say so."""
    return dataclasses.is_dataclass(cls) or issubclass(cls, Enum) or hasattr(cls, "to_state")
