"""One run as a command: composed, checked, on ranks, and how it ends."""
