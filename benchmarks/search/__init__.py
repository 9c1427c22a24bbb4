"""The claims about `search`, measured: `python -m benchmarks.search`."""
