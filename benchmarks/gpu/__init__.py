"""What one GPU can show of this project in less than an hour: `python -m benchmarks.gpu`."""
