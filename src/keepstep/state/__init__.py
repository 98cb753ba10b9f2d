"""The live state: from objects to keys, tensors and plain values, and back into the same objects."""

from keepstep.state.marks import Coordinates, PerRank, Sharded, per_rank, sharded
from keepstep.state.train_state import TrainState

__all__ = ["Coordinates", "PerRank", "Sharded", "TrainState", "per_rank", "sharded"]
