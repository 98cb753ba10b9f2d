"""Bytes in motion: from tensors into the arena, from the arena to storage, from storage into tensors."""
