"""Where steps are kept: the storage contract and its implementations. No torch, no knowledge of checkpoints."""
