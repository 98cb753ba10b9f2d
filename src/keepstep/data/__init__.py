"""Samplers and loaders whose position survives a resume, and a resume on another number of ranks."""

from keepstep.data.loader import ResumableLoader
from keepstep.data.packing import PackingCollator
from keepstep.data.reader import StreamReader
from keepstep.data.samplers import ResumableBatchSampler, ResumableSampler
from keepstep.data.stateful import stateful_loader
from keepstep.data.streams import ShardedSource

__all__ = [
    "PackingCollator",
    "ResumableBatchSampler",
    "ResumableLoader",
    "ResumableSampler",
    "ShardedSource",
    "StreamReader",
    "stateful_loader",
]
