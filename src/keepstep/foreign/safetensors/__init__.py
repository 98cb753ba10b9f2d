"""Safetensors as Hugging Face's libraries lay them out."""
