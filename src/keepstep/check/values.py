"""What a tree of plain values refers to, found without making one object of the user's classes.

In: the bytes of a tree as they stand in a state file. Out: the references in it. A checkpoint can so be verified on a
machine that has neither the user's code nor torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from keepstep.errors import CorruptError
from keepstep.format.objects import ObjectNode, RankRef, TensorRef, decode

__all__ = ["Outline", "outline"]

_CLASS_TAGS = ("dataclass", "class")


@dataclass(frozen=True, slots=True)
class Outline:
    """The names at the top of a tree, the tensors it stands for, and the values that ranks have of their own."""

    names: tuple[str, ...]
    tensors: tuple[TensorRef, ...]
    per_rank: tuple[RankRef, ...]


def outline(data: bytes, name: str) -> Outline:
    """Decodes a tree and collects its references; every tag and value in it is proved on the way.

    Args:
        data: the tree's bytes.
        name: where they came from, for messages.

    Raises:
        CorruptError: not a tree of plain values.
    """
    try:
        plain = msgspec.json.decode(data)
        tree = decode(msgspec.json.encode(_without_classes(plain)))
        if not isinstance(tree, dict):
            raise CorruptError(f"the top of the tree is a {type(tree).__name__}, not a mapping")
        tensors: list[TensorRef] = []
        per_rank: list[RankRef] = []
        for item in _references(tree):
            if type(item) is TensorRef:
                tensors.append(item)
            else:
                per_rank.append(item)
    except (CorruptError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
        raise CorruptError(f"{name}: {err}") from err
    return Outline(tuple(map(str, tree)), tuple(tensors), tuple(per_rank))


def _without_classes(plain: Any) -> Any:
    """The same JSON with members of registered classes as what they are made from, so that no class is needed."""
    if type(plain) is list:
        return [_without_classes(item) for item in plain]
    if type(plain) is not dict:
        return plain
    tag = plain.get("$")
    if tag == "enum":
        return f"{plain.get('type')}.{plain.get('v')}"
    if tag in _CLASS_TAGS:
        # As a tuple it can still be a key or a member of a set, wherever the object itself could.
        return {"$": "tuple", "v": [str(plain.get("type")), _hashable(_without_classes(plain.get("v")))]}
    return {key: _without_classes(item) for key, item in plain.items()}


def _hashable(plain: Any) -> Any:
    if type(plain) is list:
        return {"$": "tuple", "v": [_hashable(item) for item in plain]}
    if type(plain) is dict and "$" not in plain:
        return {"$": "tuple", "v": [{"$": "tuple", "v": [key, _hashable(item)]} for key, item in plain.items()]}
    return plain


def _references(tree: Any) -> Iterator[Any]:
    """Every reference below, in the order of the tree."""
    if type(tree) in (TensorRef, RankRef):
        yield tree
    elif type(tree) is ObjectNode:
        yield from _references(tree.tree)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from _references(item)
    elif isinstance(tree, list | tuple | set | frozenset | deque):
        for item in tree:
            yield from _references(item)
