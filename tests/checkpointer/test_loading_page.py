"""docs/loading.md: its examples run, one after the other, and do what the page says."""

from __future__ import annotations

import re

import pytest
import torch

from tests.architecture.source import ROOT


@pytest.mark.slow
def test_the_examples_of_the_page_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    page = (ROOT / "docs/loading.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert (
        len(blocks) == len(re.findall(r"^```python", page, re.MULTILINE)) > len(re.findall(r"^## ", page, re.MULTILINE))
    )
    names = {"__name__": "page"}
    for number, block in enumerate(blocks):
        exec(compile(block, f"docs/loading.md, block {number}", "exec"), names)
    printed = capsys.readouterr().out
    assert "['model/head.weight', 'model/head.bias']" in printed
    assert "optimizer/state/head.weight: begins anew" in printed
    assert re.search(r"a dry run: would restore step 100 from .*base", printed)
    assert re.search(r"240 bytes of model/rank-00000\.", printed)
    base, adapted, target = (names[name] for name in ("base", "adapted", "target"))
    assert names["state"]["optimizer"].param_groups[0]["lr"] == 1e-3
    assert len(names["state"]["optimizer"].state) == len(names["grown"]["optimizer"].state) == 6
    assert torch.equal(names["small"].layers[1].weight, base["model"].layers[2].weight)
    assert torch.equal(target["model"].lora_a.weight, adapted.lora_a.weight)
    for layer, other in zip(base["model"].layers, target["model"].layers, strict=True):
        assert torch.equal(layer.weight, other.weight)
    assert torch.equal(names["fresh"].head.weight, names["tuned"].head.weight)
    assert torch.equal(names["fresh"].layers[0].weight, base["model"].layers[0].weight)
