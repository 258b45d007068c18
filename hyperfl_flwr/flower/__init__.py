"""Names of Flower that are not public: only modules of this folder import them.

Public are the packages in `flwr.__all__` and the names in their `__all__`. All else may change in any release of
Flower without notice. `tests/unit/test_flower_names.py` compares what is used here with the installed Flower.

Import the modules by name: this package imports none of them, since the processes of a node must start quickly.
"""

CHECKED_VERSION = "1.41"
"""The minor version of Flower with which the names in this folder were compared."""
