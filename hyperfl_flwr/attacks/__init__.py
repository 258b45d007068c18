"""Attacks of an honest-but-curious server: reconstruct images or labels from a client's reply."""
