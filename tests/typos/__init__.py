"""Every single-character typo in every word of every shipped plan, and whether `validate` tells it.

    python -m tests.typos

`words.py` finds the words of a plan, `edits.py` misspells them by a stated rule, `sweep.py` checks each
misspelt plan as `validate` does, `table.py` prints what came of it.
"""
