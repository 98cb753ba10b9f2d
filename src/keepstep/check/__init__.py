"""Proof: what any storage must do, and whether a step at rest is what was written."""
