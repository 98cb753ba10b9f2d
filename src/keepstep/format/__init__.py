"""The record types that rooms hand to each other, and their form on disk. No I/O, no torch."""
