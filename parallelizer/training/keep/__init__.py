"""Checkpoints of a run, what they tell of it, and how a run goes on from one."""
