"""Simulations on the hosts of a running Ray cluster."""
