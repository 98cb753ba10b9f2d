"""How much of keepstep a reader meets who follows one small tensor through ``save`` and ``load``.

Counted are Python functions of keepstep that really run, on any thread, except those of ``errors``, ``timeline`` and
``failpoints``:

- files: how many of them hold these functions,
- functions: how many different ones,
- moves: how many different pairs of a caller and a function in another file that it reaches (a reader's jumps; the
  same jump taken twice, in a loop, is one),
- upward calls: moves into a higher floor, which would mean that something was called back.

Counted the same way, torch's own checkpoint package (2.13) needs 16 files, 97 functions and 58 moves for this save.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType

import pytest
import torch

from tests.architecture.source import HEIGHT, PACKAGE

NOT_COUNTED = {"errors", "failpoints", "timeline"}
FILES, FUNCTIONS, MOVES, UPWARD = 15, 60, 40, 0


@dataclass
class Trail:
    """What one call went through. Functions are code objects; a move is (caller, callee)."""

    functions: set[CodeType] = field(default_factory=set)
    moves: set[tuple[CodeType, CodeType]] = field(default_factory=set)

    def watch(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not _counts(frame.f_code):
            return
        self.functions.add(frame.f_code)
        caller = frame.f_back
        while caller is not None and not _counts(caller.f_code):
            caller = caller.f_back
        if caller is not None and caller.f_code.co_filename != frame.f_code.co_filename:
            self.moves.add((caller.f_code, frame.f_code))

    @property
    def files(self) -> set[str]:
        return {code.co_filename for code in self.functions}

    @property
    def upward(self) -> list[str]:
        return [f"{_name(a)} -> {_name(b)}" for a, b in self.moves if HEIGHT[_room(b)] > HEIGHT[_room(a)]]

    def __str__(self) -> str:
        by_file = {path: sorted(c.co_qualname for c in self.functions if c.co_filename == path) for path in self.files}
        lines = [f"  {Path(p).relative_to(PACKAGE)}: {', '.join(names)}" for p, names in sorted(by_file.items())]
        return "\n".join(
            [f"{len(self.files)} files, {len(self.functions)} functions, {len(self.moves)} moves", *lines]
            + [f"  {_name(a)} -> {_name(b)}" for a, b in sorted(self.moves, key=lambda move: _name(move[0]))]
        )


def _room(code: CodeType) -> str:
    return Path(code.co_filename).relative_to(PACKAGE).parts[0].removesuffix(".py")


def _name(code: CodeType) -> str:
    return f"{Path(code.co_filename).relative_to(PACKAGE)}:{code.co_qualname}"


def _counts(code: CodeType) -> bool:
    """A function of keepstep; not a module's body, nor a comprehension or lambda, which are part of their function."""
    if not code.co_filename.startswith(f"{PACKAGE}/") or code.co_name.startswith("<"):
        return False
    return _room(code) not in NOT_COUNTED | {"__init__"}


def follow(call: Callable[[], object]) -> Trail:
    path = Trail()
    previous, previous_in_threads = sys.getprofile(), threading.getprofile()
    threading.setprofile(path.watch)
    sys.setprofile(path.watch)
    try:
        call()
    finally:
        sys.setprofile(previous)
        threading.setprofile(previous_in_threads)
    return path


@pytest.fixture(scope="module")
def step(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("reading") / "step-00000001"


@pytest.mark.parametrize("verb", ["save", "load"])
def test_one_tensor_is_followed_quickly(verb, step, capsys):
    import keepstep as ks

    whole = {"w": torch.arange(12.0).reshape(3, 4)}
    empty = {"w": torch.zeros(3, 4)}
    call = (lambda: ks.save(step, whole)) if verb == "save" else (lambda: ks.load(step, into=empty))
    # Once without counting: modules are imported on first use, and their class bodies are no functions of the path.
    ks.save(step.with_name("step-00000000"), whole, overwrite=True)
    ks.load(step.with_name("step-00000000"), into=empty)
    if verb == "load" and not step.exists():
        ks.save(step, whole)
    empty["w"].zero_()
    path = follow(call)
    with capsys.disabled():
        figures = f"{len(path.files)} files, {len(path.functions)} functions, {len(path.moves)} moves"
        print(f"\n[reading path of {verb}: {figures}, {len(path.upward)} upward]")
    assert verb == "save" or torch.equal(empty["w"], whole["w"])
    assert path.functions, f"{verb} ran no function of keepstep"
    assert not path.upward, f"called back: {path.upward}"
    assert len(path.files) <= FILES, str(path)
    assert len(path.functions) <= FUNCTIONS, str(path)
    assert len(path.moves) <= MOVES, str(path)
