"""How much a run survives: kills, other meshes, damaged files. `python -m tests.survival` measures it."""
