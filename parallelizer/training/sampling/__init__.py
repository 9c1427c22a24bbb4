"""Text from a trained model: the command, the logits of the next token, and drawing it."""
