"""Keys: the path of a leaf as one string, ``optimizer/state/layers.0.weight/exp_avg``.

Segments are joined by ``/``. Inside a segment ``~`` is written ``~0`` and ``/`` is written ``~1`` (RFC 6901). A string
that could be mistaken for an integer gets the prefix ``~s`` and an empty one is ``~e``; an integer is written in digits; any other kind of
dictionary key is written with a ``~`` tag, so that ``1``, ``"1"``, ``True`` and ``None`` stay four different keys.
Keys are never file paths.
"""

from __future__ import annotations

__all__ = ["join", "segment"]


def segment(part: object) -> str:
    """One dictionary key or list index as a path segment; different keys give different segments."""
    if type(part) is str:
        if not part:
            return "~e"
        if "~" in part or "/" in part:
            part = part.replace("~", "~0").replace("/", "~1")
        digits = part[1:] if part[:1] == "-" else part
        return f"~s{part}" if digits.isdigit() else part
    if type(part) is int:
        return str(part)
    text = repr(part).replace("~", "~0").replace("/", "~1")
    return f"~{type(part).__name__[0]}{text}"


def join(path: str, part: object) -> str:
    """The key of ``part`` below ``path``; ``path`` is empty at the root."""
    tail = segment(part)
    return f"{path}/{tail}" if path else tail
