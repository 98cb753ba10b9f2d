"""How long 20,000 tensors of 4 KiB take, against torch.save and torch.load.

torch.save is not asked to make the file durable and torch.load returns tensors of its own; the
others fsync what they write and fill tensors that exist.
"""

from __future__ import annotations

import statistics

import torch
from contestants import Contestant, Dcp, TorchCheckpointing, TorchSave, check, clear, make_state, ourselves
from harness import Bar, Context, Entry, Result, bring_into_page_cache, median_ratio, play, remove, result, run_question

SAVE_BAR = Bar("<=", 0.8)
LOAD_BAR = Bar("<=", 0.5)


class TorchAlone(TorchSave):
    """The yardstick: torch.save and torch.load and nothing around them."""

    def __init__(self, context: Context) -> None:
        super().__init__(context, sync=False)

    def load(self, path, _state: object) -> None:
        self.loaded = torch.load(path / self.file, weights_only=True)


def many(context: Context) -> list[Result]:
    """Save and load in one set of rounds."""
    count = 2000 if context.quick else 20_000
    state = make_state(context, tensors=count, rows=8, columns=128)
    yardstick = TorchAlone(context)
    contestants: list[Contestant] = [
        yardstick,
        *ourselves(context),
        TorchSave(context),
        TorchCheckpointing(context, items=1),
        Dcp(context),
    ]
    entries = []
    for each in contestants:
        entries += _save_and_load(context, each, state, judged=each is not yardstick)
    seconds = play(context, entries)
    found = []
    for kind, bar in (("save", SAVE_BAR), ("load", LOAD_BAR)):
        limit = seconds[f"{yardstick.name}, {kind}"]
        for each in contestants:
            own = seconds[f"{each.name}, {kind}"]
            found.append(
                result(
                    f"{count:,} tensors of 4 KiB, {kind}: {each.name}",
                    statistics.median(own),
                    "s",
                    against=f"torch.{kind}",
                    ratio=median_ratio(own, limit),
                    bar=bar if each.name == "keepstep" else None,
                )
            )
    return found


def _save_and_load(context: Context, contestant: Contestant, state: dict, *, judged: bool) -> list[Entry]:
    path = context.directory / contestant.name / "step-00000001"

    def before_load() -> None:
        bring_into_page_cache(path)
        clear(state)

    def after_load() -> None:
        if judged:
            check(context, state, contestant.name)
        else:
            state.update(make_state(context, len(state["model"]), rows=8, columns=128))
        remove(path)

    return [
        Entry(f"{contestant.name}, save", lambda: contestant.save(path, state)),
        Entry(f"{contestant.name}, load", lambda: contestant.load(path, state), before_load, after_load),
    ]


if __name__ == "__main__":
    run_question({"one-rank": (1, many)})
