"""Patterns of keys, as people write them: ``*`` stays within a name, ``**`` does not, and a key stands for all below it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence

from keepstep.errors import UsageError

__all__ = ["Globs", "near"]

SHOWN = 3
MOST_COMPARED = 5000
_SPECIAL = frozenset("*?[")


class Globs:
    """Some patterns, and which keys they take: those that fit, and everything below them.

    ``*`` and ``?`` stand for characters other than ``/``, ``**`` for any, ``[a-f]`` and ``[!a-f]`` for one of some. A
    ``/**`` at the end takes what is above it as well, which may be empty.

    >>> Globs(["model/layers.*"], "only").takes("model/layers.0.weight")
    True
    >>> Globs(["optimizer"], "only").takes("optimizer/state/w/exp_avg")
    True
    """

    def __init__(self, patterns: Iterable[str], option: str, *, below: bool = True) -> None:
        """Reads the patterns; ``option`` is what to call them in an error. Without ``below`` they take no more than fits.

        Raises:
            UsageError: one text in the place of several, or what is no text.
        """
        if isinstance(patterns, str):
            raise UsageError(f"{option}={patterns!r}: give a list of patterns, such as [{patterns!r}]")
        self.patterns = tuple(patterns)
        strange = [each for each in self.patterns if not isinstance(each, str) or not each]
        if strange:
            raise UsageError(f"{option}={strange[0]!r}: a pattern is a text such as 'model/layers.*'")
        tail = "(?:/.*)?" if below else ""
        heads = [each.removesuffix("/**") if below else each for each in self.patterns]
        self._below = below
        # Keys as they are, of which there may be thousands, are looked up. One with brackets or stars is a pattern too.
        self._heads = dict(zip(self.patterns, heads, strict=True))
        self._keys = {head for head in heads if not _SPECIAL & {*head}}
        self._each = {
            head: re.compile(f"(?:{re.escape(head)}|{_expression(head)}){tail}", re.DOTALL)
            for head in heads
            if head not in self._keys
        }

    def takes(self, key: str) -> bool:
        """Whether the key, or one above it, fits any of the patterns."""
        return any(True for _ in self._plain(key)) or any(each.fullmatch(key) for each in self._each.values())

    def _plain(self, key: str) -> Iterator[str]:
        """Those of the keys that are given as they are which take this one."""
        head, above = key, "/" if self._keys else ""
        while above:
            if head in self._keys:
                yield head
            head, above, _ = head.rpartition("/") if self._below else ("", "", "")

    def idle(self, keys: Iterable[str]) -> list[str]:
        """The patterns that take none of these keys."""
        left = dict(self._each)
        found: set[str] = set()
        for key in keys:
            found.update(self._plain(key))
            for head in [head for head, each in left.items() if each.fullmatch(key)]:
                del left[head]
                found.add(head)
            if not left and len(found) == len(self._each) + len(self._keys):
                break
        return [pattern for pattern, head in self._heads.items() if head not in found]


def near(wanted: str, keys: Sequence[str]) -> str:
    """Words about the keys that look most like this one; empty where none does."""
    close = difflib.get_close_matches(wanted, keys[:MOST_COMPARED], n=SHOWN, cutoff=0.6)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def _expression(pattern: str) -> str:
    return "".join(_pieces(pattern))


def _pieces(pattern: str) -> Iterator[str]:
    for piece in re.findall(r"\*\*|\*|\?|\[!?[^\]]+\]|.", pattern, re.DOTALL):
        if piece in ("**", "*", "?"):
            yield {"**": ".*", "*": "[^/]*", "?": "[^/]"}[piece]
        elif len(piece) > 1:
            inner = piece[1:-1].replace("\\", r"\\")
            yield f"[^/{inner[1:]}]" if inner.startswith("!") else f"[{inner.replace('^', chr(92) + '^')}]"
        else:
            yield re.escape(piece)
