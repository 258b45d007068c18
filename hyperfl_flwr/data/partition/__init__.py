"""Partition of a data set among clients."""
