"""Clients that were never trained: how a node answers for them."""
