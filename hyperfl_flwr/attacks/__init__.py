"""Attacks of a curious server: reconstruct images or labels from a client's reply."""
