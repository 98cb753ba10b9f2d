"""What happens to a save after the copy, in a process of its own that outlives the trainer. Imports no torch."""
