"""Copies of steps, nearest first: where a run's steps can be read from, and how far the copies are behind."""
