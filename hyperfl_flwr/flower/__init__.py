"""All use of Flower's non-public names, and of Ray's: only modules of this folder import them.

The public names are the packages in `flwr.__all__` and the names in their `__all__`. All others may change in any
release of Flower without notice. `tests/unit/test_flower_names.py` compares the names used here with the installed
Flower, which asks for a certain version of Ray.

Import its modules by name: the package itself imports none of them, since a node's processes must start quickly.
"""

CHECKED_VERSION = "1.41"
"""The minor version of Flower with which the names in this folder were compared."""
