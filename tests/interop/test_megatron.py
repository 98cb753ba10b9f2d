"""Sharded state dicts of Megatron-Core: saved with two parts of every matrix, loaded with two and with one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import keepstep as ks
from tests.helpers.ranks import RankPool
from tests.interop import megatron_checks as checks

pytestmark = [pytest.mark.slow, pytest.mark.ranks]


def test_a_sharded_state_dict_is_saved_and_filled_in_another_layout(tmp_path):
    # Processes of its own: Megatron takes long to import, and stays.
    with RankPool(2) as pool:
        halves = pool(2)(checks.saved_and_loaded, str(tmp_path), timeout_s=120)
        pool(2)(checks.loaded_whole, str(tmp_path), halves)
        # Two tensor-parallel ranks, then two data-parallel ones; each is loaded on one rank and on two.
        for parts in (2, 1):
            folder = tmp_path / f"optimizer-{parts}"
            pool(2)(checks.optimizer_saved, str(folder), parts)
            for world in (1, 2):
                pool(world)(checks.optimizer_loaded, str(folder))
                with ks.open(folder / "flat") as saved, ks.open(folder / f"again-{world}") as again:
                    assert set(saved) == set(again)
                    assert len(saved) == 4 * 3
                    for key in saved:
                        assert torch.equal(saved[key], again[key]), key
                    assert saved["optimizer/mlp.linear_fc1.weight/exp_avg"].shape == (64, 8)
                    assert saved["optimizer/mlp.linear_fc1.weight/exp_avg"].all()


def test_the_code_of_the_page_runs(tmp_path):
    page = (Path(__file__).parents[2] / "docs/coming-from-megatron.md").read_text()
    [block] = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "page.py").write_text(block)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "page.py"]
    ran = subprocess.run(torchrun, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "runs/gpt/step-00000100/.metadata").exists()
