"""Samplers and loaders whose position survives a resume, and a resume on another number of ranks."""

from keepstep.data.loader import ResumableLoader
from keepstep.data.samplers import ResumableBatchSampler, ResumableSampler

__all__ = ["ResumableBatchSampler", "ResumableLoader", "ResumableSampler"]
