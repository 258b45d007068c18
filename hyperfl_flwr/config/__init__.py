"""Typed, validated settings of a run and of a node."""
