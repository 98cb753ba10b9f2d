"""The live state: from objects to keys, tensors and plain values, and back into the same objects."""

from keepstep.state.flat_buffers import FlatPiece, flat, flat_pieces
from keepstep.state.marks import Coordinates, Flat, PerRank, Sharded, per_rank, sharded
from keepstep.state.train_state import TrainState

__all__ = [
    "Coordinates",
    "Flat",
    "FlatPiece",
    "PerRank",
    "Sharded",
    "TrainState",
    "flat",
    "flat_pieces",
    "per_rank",
    "sharded",
]
