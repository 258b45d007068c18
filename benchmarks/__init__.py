"""Benchmarks of speed and memory, and of the quickstart's accuracies, run by `make bench`."""
