"""The stories of what people load, in one process, and from and into two ranks of sharded parameters."""

from __future__ import annotations

import pytest

from tests.checkpointer.stories import STORIES
from tests.resharding.models import forget_meshes

OF_TENSORS = [story for story in STORIES if not story.startswith("schedules")]
FROM_ONE = ["frozen", "grown", "renumbered", "teacher"]


@pytest.mark.slow
@pytest.mark.parametrize("story", STORIES)
def test_in_one_process(story, tmp_path):
    save, load = STORIES[story]
    save(tmp_path, "none")
    load(tmp_path, "none")


def sharded(rank, folder, other):
    """Saves every story on these ranks, and loads it from here and from what one process has saved."""
    forget_meshes()
    for story in OF_TENSORS:
        save, load = STORIES[story]
        save(f"{folder}/{story}", "fsdp")
        load(f"{folder}/{story}", "fsdp")
    for story in FROM_ONE:
        STORIES[story][1](f"{other}/{story}", "fsdp")


def test_on_two_ranks_and_between_one_and_two(rank_pool, tmp_path):
    for story in FROM_ONE:
        STORIES[story][0](f"{tmp_path}/one/{story}", "none")
    rank_pool(2)(sharded, f"{tmp_path}/two", f"{tmp_path}/one", timeout_s=120)
    for story in OF_TENSORS:
        STORIES[story][1](f"{tmp_path}/two/{story}", "none")
