"""Text to batches: a source (`stdlib`, `text`) gives `Data`, the `loader` cuts batches out of it."""

from recipes.data.corpus import Data, build_data

__all__ = ["Data", "build_data"]
