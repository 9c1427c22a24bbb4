"""Training runs that others published, predicted: `python -m benchmarks.published [FILE]`."""
