"""Architectures that `init` is tried on: own models, and tiny ones of transformers."""
