"""Clients that were never trained: how strategies assess and serve them."""
