"""Where a value stands in a state: the keys of dictionaries and the places in lists that lead to it."""

from __future__ import annotations

from typing import Any

from keepstep.errors import CorruptError
from keepstep.format.objects import join

__all__ = ["Path", "key_of", "place"]

Path = tuple[str | int, ...]


def key_of(path: Path) -> str:
    """The key of a place in the state."""
    key = ""
    for part in path:
        key = join(key, part)
    return key


def place(tree: dict[str, Any], path: Path, value: Any, most: int) -> None:
    """Puts a value where it stood: text is a dictionary's key, a number a place in a list of at most ``most``.

    Raises:
        CorruptError: that is no place, or is taken.
    """
    here: Any = tree
    for part, after in zip(path, (*path[1:], None), strict=True):
        made: Any = value if after is None else {} if type(after) is str else []
        if type(part) is str and isinstance(here, dict):
            here = here.setdefault(part, made)
        elif type(part) is int and isinstance(here, list) and 0 <= part <= most:
            here.extend([None] * (part + 1 - len(here)))
            here[part] = made if here[part] is None else here[part]
            here = here[part]
        else:
            raise CorruptError(f"{path!r} cannot be a place in the state: {part!r} of a {type(here).__name__}")
    if here is not value:
        raise CorruptError(f"{path!r} stands in the state twice")
