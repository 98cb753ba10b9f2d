"""A dry run says what a load then reads: the same keys, files and bytes."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

import keepstep as ks
from tests.helpers.storages import Watched
from tests.resharding.models import forget_meshes, spread

WIDTH = 256
BLOCK = 1 << 16
"""Bytes are proved in blocks of this size, so that a part of a tensor may cost one more at either end."""


class Counting(Watched):
    """Also counts the bytes read of each file."""

    def __init__(self, inner):
        super().__init__(inner)
        self.bytes_of = Counter()

    def note(self, operation, name, read=0, written=0):
        super().note(operation, name, read, written)
        with self.lock:
            self.bytes_of[name] += read


def state_of(layout, seed, layers=2):
    torch.manual_seed(seed)
    model = spread(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))), layout)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return ks.TrainState(
        model=model, optimizer=optimizer, mine=ks.per_rank({"t": torch.ones(5000)}, "same_rank"), note={"n": [1, 2]}
    )


OPTIONS = (
    {},
    {"only": ["model"]},
    {"only": ["model/1.*", "optimizer/state/*/exp_avg"]},
    {"only": ["note"]},
    {"only": ["optimizer"], "override": {"optimizer/param_groups/*/lr": 0.5}},
    {"cast": {"optimizer/state/**/exp_avg": torch.bfloat16}},
)


SOME = OPTIONS[::2]


def look_and_read(rank, folder, layout, loads=OPTIONS):
    """For each load: what was foreseen, what the report says, and what was read of each file."""
    forget_meshes()
    told = []
    for options in loads:
        state = state_of(layout, 1)
        storage = Counting(folder)
        look = ks.load(storage, state, dry_run=True, **options)
        before = Counter(storage.bytes_of)
        report = ks.load(storage, state, **options)
        counts = {name: count for name, count in (storage.bytes_of - before).items() if "/" in name}
        assert look.bytes_read == 0
        assert look.components == report.components
        told.append((look.rank_bytes, look.files, look.bytes_needed, report.bytes_needed, report.bytes_read, counts))
    return told


def check(told_by_rank, folder):
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    for told in zip(*told_by_rank, strict=True):
        rank_bytes, files = told[0][:2]
        assert all((each[0], each[1]) == (rank_bytes, files) for each in told)
        assert rank_bytes == tuple(each[2] for each in told) == tuple(each[3] for each in told)
        assert sum(files.values()) == sum(rank_bytes)
        read = sum((Counter(each[5]) for each in told), Counter())
        values = {name: count for name, count in read.items() if name not in files}
        # Beside what was foreseen, the files with plain values are read; nothing else is.
        assert {name.partition("/")[0] for name in values} <= {"state"}
        for name, foreseen in files.items():
            assert foreseen <= read[name] <= foreseen + len(told) * (sizes[name] // 64 + 8192 + 8 * BLOCK), name
    assert told_by_rank[0][0][1] != told_by_rank[0][1][1]


@pytest.mark.slow
def test_alone(tmp_path):
    ks.save(tmp_path / "s", state_of("none", 0))
    check([look_and_read(0, tmp_path / "s", "none")], tmp_path / "s")


def save(rank, folder):
    forget_meshes()
    ks.save(folder, state_of("fsdp", 0))


def test_on_other_numbers_of_ranks(rank_pool, tmp_path):
    rank_pool(2)(save, str(tmp_path / "s"))
    check(rank_pool(3)(look_and_read, str(tmp_path / "s"), "fsdp", SOME), tmp_path / "s")
    check([look_and_read(0, str(tmp_path / "s"), "none", SOME)], tmp_path / "s")
