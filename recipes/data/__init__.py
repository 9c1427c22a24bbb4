"""Where batches come from: `images`, or text (`stdlib`, `text`, `halves`), out of which the `loader` cuts them."""

from recipes.data.corpus import Data, build_data
from recipes.data.source import Source

__all__ = ["Data", "Source", "build_data"]
