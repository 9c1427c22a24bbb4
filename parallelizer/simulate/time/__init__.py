"""How long a recorded step takes: its operators and collectives priced for a machine, and replayed on queues."""
