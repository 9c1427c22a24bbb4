"""Models to try the tool on. They know nothing of parallelism, as one's own need not."""
