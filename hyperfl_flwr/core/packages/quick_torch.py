"""Import torch within `quick_imports`; a program that always needs torch imports this module before all others."""

from hyperfl_flwr.core.packages.quick_imports import quick_imports

with quick_imports():
    import torch  # noqa: F401
