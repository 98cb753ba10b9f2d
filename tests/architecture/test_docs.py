"""What the pages say is true: code in them runs, links lead somewhere, the errors page is that of the error tree."""

from __future__ import annotations

import doctest
import importlib
import os
import re
import runpy
import subprocess
import sys

import pytest

from tests.architecture.source import ROOT, modules

PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "changes/README.md", "benchmarks/*.md", "examples/*.md")
    for path in ROOT.glob(pattern)
)
BLOCK = re.compile(r"^```python[ ]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def anchors(markdown: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+[ ]+(.+)$", FENCED.sub(lambda m: "" if m[0].startswith("```") else m[0], markdown), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    broken = []
    for link in LINK.findall(FENCED.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path.read_text())):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        pytest.param("docs/background-saves.md", marks=pytest.mark.slow),
        pytest.param("docs/data.md", marks=pytest.mark.slow),
        pytest.param("docs/flat-buffers.md", marks=pytest.mark.slow),
    ],
)
def test_the_code_of_a_page_runs(page, tmp_path):
    blocks = BLOCK.findall((ROOT / page).read_text())
    assert blocks
    for number, block in enumerate(blocks):
        script = tmp_path / f"block_{number}.py"
        script.write_text(block)
        ran = subprocess.run(
            [sys.executable, script.name],
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert ran.returncode == 0, f"block {number}:\n{block}\n{ran.stderr}"
        assert not ran.stderr


def test_the_errors_page_is_generated_from_the_tree():
    page = runpy.run_path(str(ROOT / "scripts/errors_page"))["page"]()
    found = (ROOT / "docs/errors.md").read_text()
    assert found == page, "docs/errors.md is not what the tree says: run scripts/errors_page > docs/errors.md"


def test_error_codes_are_unique_and_exit_statuses_small():
    from keepstep import errors

    kinds = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, errors.CheckpointError)]
    codes = [kind.code for kind in kinds]
    assert sorted(set(codes)) == sorted(codes)
    assert all(0 < kind.exit_status < 64 for kind in kinds)


@pytest.mark.parametrize("name", [module.name for module in modules()])
def test_examples_in_docstrings_run(name):
    if ">>>" in next(module.path.read_text() for module in modules() if module.name == name):
        assert doctest.testmod(importlib.import_module(name)).failed == 0
