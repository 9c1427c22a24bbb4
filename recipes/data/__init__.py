"""Where batches come from: text (`stdlib`, `text`, `halves`), which is `Data` that the `loader` cuts batches out of, and `images`."""

from recipes.data.corpus import Data, build_data
from recipes.data.source import Source

__all__ = ["Data", "Source", "build_data"]
