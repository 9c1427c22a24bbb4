"""Where batches come from: `images`, or `windows` cut out of a text (`stdlib`, `text`, `hf_dataset`, `halves`)."""
