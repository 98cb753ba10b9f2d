"""What a user says about a value that keepstep cannot see by itself: this rank's own, or a part of something larger."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from keepstep.errors import UsageError

__all__ = ["RULES", "Coordinates", "Flat", "PerRank", "Rule", "Scope", "Sharded", "per_rank", "sharded"]

RULES = ("error", "same_rank", "derive")


@dataclass(frozen=True, slots=True, eq=False)
class Coordinates(Mapping[str, int]):
    """Where a value was saved, or where it is loaded, as numbers by name.

    ``{"rank": 3, "world": 4}`` for a value of every rank; the index along each named dimension of the mesh, such as
    ``{"dp": 1}``, for one that ranks share. ``sizes`` says how many there are along each.
    """

    names: tuple[str, ...]
    index: tuple[int, ...]
    sizes: tuple[int, ...]

    def __getitem__(self, name: str) -> int:
        """The index along a dimension."""
        return self._numbers()[name]

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(self._numbers())

    def __len__(self) -> int:
        """How many names there are."""
        return len(self._numbers())

    def __hash__(self) -> int:
        """Equal to that of the same coordinates elsewhere."""
        return hash((self.names, self.index, self.sizes))

    def size(self, name: str) -> int:
        """How many indices there are along a dimension."""
        return self.sizes[self.names.index(name)]

    def _numbers(self) -> dict[str, int]:
        numbers = dict(zip(self.names, self.index, strict=True))
        return numbers | {"world": self.sizes[0]} if self.names == PLAIN else numbers


PLAIN = ("rank",)
"""The names of a scope in which every rank has a value of its own."""
Rule = str | Callable[[list[tuple[Coordinates, Any]], Coordinates], Any]


@dataclass(frozen=True, slots=True)
class Scope:
    """Which ranks share a value: those at the same place of a grid. ``places`` has the place of every rank, row-major."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    places: tuple[int, ...]

    def owners(self) -> tuple[int, ...]:
        """For every place the first of its ranks, which stores the value."""
        first: dict[int, int] = {}
        for rank, place in enumerate(self.places):
            first.setdefault(place, rank)
        return tuple(first[place] for place in range(len(first)))


@dataclass(slots=True)
class PerRank:
    """A value each rank has of its own under a shared key. Made by ``per_rank``; ``value`` is replaced by a load.

    ``scope`` is None when every single rank has one.
    """

    value: Any
    on_world_change: Rule = "error"
    scope: Scope | None = None


@dataclass(frozen=True, slots=True)
class Sharded:
    """Local tensors that are boxes of one global tensor. Made by ``sharded``, with one box, and ``flat``.

    ``locals`` holds at least one tensor; ``starts`` says of each where its box begins, in elements. With ``in_place`` a load
    of an object, whose state this is a part of, reads into these tensors instead of new ones.
    """

    locals: tuple[torch.Tensor, ...]
    global_shape: tuple[int, ...]
    starts: tuple[tuple[int, ...], ...]
    in_place: bool = False

    @property
    def local(self) -> torch.Tensor:
        """The local tensor, of which there is one unless this is a part of a flat buffer; else the first."""
        return self.locals[0]

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where the box of ``local`` begins, in elements."""
        return self.starts[0]

    def empty_like(self, dtype: torch.dtype) -> Sharded:
        """The same boxes in new memory; where they are read in place, and the dtype is theirs, this one itself."""
        if self.in_place and dtype == self.local.dtype:
            return self
        made = tuple(torch.empty_like(local, dtype=dtype) for local in self.locals)
        return Sharded(made, self.global_shape, self.starts)

    def copy_(self, other: Sharded) -> None:
        """Takes the elements of another one with the same boxes, converted where the dtype differs."""
        for local, source in zip(self.locals, other.locals, strict=True):
            if local.data_ptr() != source.data_ptr() or local.device != source.device:
                local.copy_(source)


class Flat(dict[str, Any]):
    """What this rank holds of flat buffers, by parameter name. Made by ``flat``.

    ``names`` are those of all parameters, also of those that have no element in the buffers of this rank.
    """

    __slots__ = ("names",)

    def __init__(self, held: Mapping[str, Any], names: frozenset[str]) -> None:
        super().__init__(held)
        self.names = names

    def copy_(self, values: Mapping[str, Any]) -> None:
        """Fills the buffers from what a ``load_state_dict`` was given for them.

        Raises:
            UsageError: lists the parameters that are missing, and those that are not held here.
        """
        if values.keys() != self.keys():
            raise UsageError(
                f"values for other parameters than the buffers hold: {sorted(values.keys() ^ self.keys())}"
            )
        with torch.no_grad():
            for name, held in self.items():
                if isinstance(held, dict):
                    for kind, part in held.items():
                        part.copy_(values[name][kind])
                else:
                    held.copy_(values[name])


def per_rank(
    value: Any, on_world_change: Rule = "error", *, mesh: Any = None, dims: str | Sequence[str] | None = None
) -> PerRank:
    """Marks a value as this rank's own: every rank stores and gets back its own one.

    With a mesh, ranks with the same coordinates along ``dims`` share one: ``dims="dp"`` keeps the position of a data
    loader once for each data-parallel rank, however many tensor-parallel ranks read the same samples. Only another size
    along ``dims`` is another world then.

    Args:
        value: anything that may stand in a state, also an object with a state_dict, or a generator of random numbers.
        on_world_change: what a load on another number of ranks does; that of the target decides. ``"error"`` refuses.
            ``"same_rank"`` gives old ranks theirs and leaves new ranks as they are. ``"derive"`` is for random number
            streams: old ranks get theirs, new ranks get new, distinct ones, the same at every load; it knows generators,
            and objects with a method ``derive(state, seed)``. A function ``rule(saved, here)`` returns this rank's value
            from all that were saved, each with its coordinates: a list of ``(Coordinates, value)`` and the coordinates
            of this rank. It is called on every rank, may not communicate, and must not change anything.
        mesh: a DeviceMesh with named dimensions that holds every rank once.
        dims: dimensions of the mesh, by name; all of them when None.

    Raises:
        UsageError: an unknown rule, dimensions that the mesh does not have, or a mesh that is a part of another.
    """
    if not callable(on_world_change) and on_world_change not in RULES:
        rules = ", ".join(map(repr, RULES))
        raise UsageError(f"on_world_change={on_world_change!r}; it is one of {rules}, or a function")
    if mesh is None and dims is not None:
        raise UsageError(f"dims={dims!r} are dimensions of a mesh; give that too: per_rank(value, mesh=mesh, dims=...)")
    return PerRank(value, on_world_change, None if mesh is None else _scope(mesh, dims))


def _scope(mesh: Any, dims: str | Sequence[str] | None) -> Scope:
    known: tuple[str, ...] = tuple(mesh.mesh_dim_names or ())
    names = known if dims is None else (dims,) if isinstance(dims, str) else tuple(dims)
    if not known or not names or len(set(names)) < len(names) or not set(names) <= set(known):
        raise UsageError(f"dims={dims!r} of a mesh with the dimensions {known}; each must be one of them, and once")
    ranks = np.asarray(mesh.mesh.tolist())
    flat = ranks.reshape(-1)
    if sorted(flat.tolist()) != list(range(flat.size)):
        raise UsageError(
            f"the mesh holds the ranks {flat.tolist()}; give per_rank the whole mesh, and name the dimensions in dims"
        )
    sizes = tuple(ranks.shape[known.index(name)] for name in names)
    where = np.unravel_index(np.arange(flat.size), ranks.shape)
    places = np.empty(flat.size, dtype=np.int64)
    places[flat] = np.ravel_multi_index([where[known.index(name)] for name in names], sizes)
    return Scope(names, sizes, tuple(places.tolist()))


def sharded(local: torch.Tensor, *, global_shape: Sequence[int], offsets: Sequence[int]) -> Sharded:
    """Marks a local tensor as the box at ``offsets`` (in elements) of a tensor of ``global_shape``.

    For shards that are not DTensors. The boxes of all ranks must cover the global tensor without overlap, or be held by
    several ranks alike; a save checks it. A rank with nothing to add passes a tensor with a zero in its shape.

    Raises:
        UsageError: the box does not fit into the global shape.
    """
    shape, start = tuple(map(int, global_shape)), tuple(map(int, offsets))
    fits = len(shape) == len(start) == local.dim() and all(
        offset >= 0 and offset + size <= limit
        for offset, size, limit in zip(start, local.shape, shape, strict=True)
        if local.numel()
    )
    if not fits:
        raise UsageError(
            f"a shard of shape {tuple(local.shape)} at {start} does not fit into a tensor of shape {shape}"
        )
    return Sharded((local,), shape, (start,))
