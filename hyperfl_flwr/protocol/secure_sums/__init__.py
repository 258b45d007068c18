"""Secure sums: the server opens the sum over all nodes' clients and nothing of one node.

`docs/privacy/secure-sums.md` states the protocol, the adversaries, and what is not protected.
"""
