"""Flower's interface of clients that exchange lists of numpy arrays.

Wraps `flwr.client.NumPyClient`. Flower's public `flwr.clientapp` has functions of messages only; the clients of all
methods share state between `fit` and `evaluate`, which `clients.engine.adapter` calls with a message's arrays.
"""

from flwr.client import NumPyClient

__all__ = ["NumPyClient"]
