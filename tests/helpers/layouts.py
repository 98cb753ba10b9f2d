"""Layouts by their definitions, as index sets: what the tests of layouts and plans compare with; and random ones."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import strategies as st

from keepstep.format.layout import Cut, Layout, Mesh


def chunk(indices: np.ndarray, ranks: int) -> list[np.ndarray]:
    """Equal chunks of ceil(n / ranks); short and empty ones at the end."""
    step = -(-len(indices) // ranks)
    return [indices[i * step : (i + 1) * step] for i in range(ranks)]


def held(layout: Layout, mesh: Mesh, rank: int) -> list[np.ndarray] | None:
    """The global indices of the rank's local tensor in every dimension, by the definitions; None when it has nothing."""
    position = mesh.members().index(rank)
    where = np.unravel_index(position, mesh.shape)
    found = [np.arange(n) for n in layout.shape]
    for cut in layout.cuts:
        index, ranks = int(where[cut.axis]), mesh.shape[cut.axis]
        if cut.kind == "S":
            found[cut.dim] = chunk(found[cut.dim], ranks)[index]
        elif cut.kind == "SS":
            outer = chunk(found[cut.dim], cut.arg)
            found[cut.dim] = np.concatenate([chunk(part, ranks)[index] for part in outer])
        elif cut.kind == "B":
            found[cut.dim] = np.array_split(found[cut.dim], ranks)[index]
        elif cut.kind == "O" and index != cut.arg:
            return None
    return found


@st.composite
def layouts(draw, kinds=("S", "SS", "B", "R", "O")):
    """A mesh of consecutive or scattered ranks, and one cut for each of its dimensions."""
    mesh_shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    size = math.prod(mesh_shape)
    world = size + draw(st.integers(0, 3))
    if draw(st.booleans()):
        mesh = Mesh(mesh_shape, draw(st.integers(0, world - size)))
    else:
        mesh = Mesh(mesh_shape, 0, tuple(draw(st.permutations(range(world)))[:size]))
    cuts = []
    for axis in draw(st.permutations(range(len(mesh_shape)))):
        kind = draw(st.sampled_from(kinds))
        arg = {"SS": draw(st.integers(1, 4)), "O": draw(st.integers(0, mesh_shape[axis] - 1))}.get(kind, 0)
        dim = draw(st.integers(0, len(shape) - 1)) if kind in ("S", "SS", "B") else 0
        cuts.append(Cut(axis, kind, dim, arg))
    # B is what a replica becomes, so it comes after the cuts of the live tensor.
    cuts.sort(key=lambda cut: cut.kind == "B")
    return Layout(shape, 0, tuple(cuts)), mesh, world
