"""Hugging Face's Trainer: ``attach`` makes it keep whole steps, and go on from them."""

from keepstep.interop.transformers.keeper import StepKeeper, attach

__all__ = ["StepKeeper", "attach"]
