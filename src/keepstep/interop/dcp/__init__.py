"""torch.distributed.checkpoint: its directories as steps, and keepstep under its own calls."""
