"""Typed settings of a run and of a node."""
