"""FLWR_HOME, the folder in which a SuperNode keeps its files.

Wraps `flwr.supercore.utils.get_flwr_home`: the environment variable, or Flower's default without it. A client
app's `Context` does not name the folder.
"""

from flwr.supercore.utils import get_flwr_home

__all__ = ["get_flwr_home"]
