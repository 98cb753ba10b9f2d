"""Several ranks in one process: what each would store, and what each would get back. Nothing is written and nobody talks.

For what depends on numbers of ranks and shapes of meshes alone, so that a test can try hundreds of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from keepstep.format.layout import Mesh
from keepstep.format.objects import decode
from keepstep.state.capture import capture
from keepstep.state.own import OwnValues
from keepstep.state.report import ComponentReport, Origin
from keepstep.state.restore import Binder
from keepstep.state.shard import LayoutTable


def mesh_of(sizes: dict[str, int], order: Sequence[int] | None = None) -> Any:
    """A mesh with these dimensions over the ranks in this order (as they come, when None)."""
    count = int(np.prod(list(sizes.values())))
    ranks = torch.tensor(list(range(count)) if order is None else list(order)).reshape(tuple(sizes.values()))
    return SimpleNamespace(mesh=ranks, mesh_dim_names=tuple(sizes))


@dataclass(frozen=True)
class Step:
    """What a number of ranks have saved: the tree they share, and values and tensors of each."""

    number: int
    tree: dict[str, Any]
    own: list[dict[str, Any]]
    tensors: list[dict[str, torch.Tensor]]

    @property
    def world(self) -> int:
        return len(self.own)


def saved(states: Sequence[dict[str, Any]], number: int = 0) -> Step:
    """The states of all ranks, saved. What ranks must agree on is taken from the first."""
    snapshots = [capture(state, rank=rank, world=len(states)) for rank, state in enumerate(states)]
    assert len({snapshot.tree for snapshot in snapshots}) == 1
    return Step(
        number,
        decode(snapshots[0].tree),
        [decode(snapshot.own_tree) if snapshot.own_tree else {} for snapshot in snapshots],
        [{key: tensor.clone() for key, _, tensor in snapshot.own} for snapshot in snapshots],
    )


def loaded(step: Step, state: dict[str, Any], rank: int, world: int) -> tuple[list[str], dict[str, ComponentReport]]:
    """Loads into the state of one of ``world`` ranks; its mismatches, with which nothing is changed, and its reports."""
    own = step.own[rank if rank < step.world else 0]
    binder = Binder(LayoutTable(rank, world, [Mesh((world,))]), state, Origin(step.world, {}, own, step.number))
    for name, node in step.tree.items():
        binder.bind_component(name, node)
    values = OwnValues(binder)
    values.bind({owner: step.own[owner] for owner in values.choose()})
    if binder.mismatches:
        return binder.mismatches, binder.reports
    for owner, targets in binder.own_targets.items():
        for key, target in targets.items():
            target.copy_(step.tensors[owner][key])
    values.call_rules()
    binder.finish()
    return [], binder.reports


def loaded_everywhere(step: Step, world: int, make: Callable[[int], dict[str, Any]]) -> list[dict[str, Any]]:
    """The states of all ranks of a world, after each has loaded into what ``make`` gives for it; nothing may differ."""
    states = [make(rank) for rank in range(world)]
    for rank, state in enumerate(states):
        mismatches, _ = loaded(step, state, rank, world)
        assert not mismatches, mismatches
    return states
