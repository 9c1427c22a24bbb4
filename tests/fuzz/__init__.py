"""A seeded, grammar-aware fuzzer of what people write: plans, presets, overrides.

    python -m tests.fuzz --cases 10000 --seed 0

`corpus.py` has what is mutated, `mutations.py` how, `drive.py` runs one case as the command line does and
measures it, `judge.py` says what is wrong with how it ended, `shrink.py` makes a failing case small.
"""
