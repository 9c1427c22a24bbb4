"""Models as people write them. Nothing in them knows of ranks, unless the case is about that."""
