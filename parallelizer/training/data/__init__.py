"""Sources of batches: `images`, or `windows` of a text (`stdlib`, `text`, `hf_dataset`, `halves`)."""
