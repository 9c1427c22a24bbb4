"""The best mesh and options for a number of GPUs: candidates, their bounds and prices, and the dry runs of the best."""
