"""Checkpoints of a run, the configuration that they contain, and resuming from one."""
