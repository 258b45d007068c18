"""Benchmarks of speed and memory, run by `make bench`; no test depends on their results."""
