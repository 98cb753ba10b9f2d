"""Who moves which bytes: pure functions from structures to plans. No torch, no I/O, no ranks."""
