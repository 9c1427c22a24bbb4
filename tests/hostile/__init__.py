"""Plans and presets from somebody who means harm: nothing is executed, opened or told.

    python -m tests.hostile

`inputs.py` has what is tried, `probe.py` runs it under an audit hook and records what Python was made to do.
"""
