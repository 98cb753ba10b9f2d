"""Drills: a user's own script is run, stopped, killed and resumed, and every resumed run compared with one that was not.

``plan`` says what will be done, ``story`` does it scenario by scenario, ``judge`` says what came of each.
"""
