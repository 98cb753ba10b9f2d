"""Safetensors as Hugging Face's libraries write and read them: a model comes in from such a folder, and leaves as one."""

from keepstep.interop.huggingface.exporting import Exported, export

__all__ = ["Exported", "export"]
