"""One run as a command: composing and checking its configuration, starting its ranks, and ending it."""
