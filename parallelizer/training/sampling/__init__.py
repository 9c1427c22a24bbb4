"""Sampling text from a trained model: the command, the logits of the next token, and drawing the token."""
