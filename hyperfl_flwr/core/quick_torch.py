"""Import torch as `quick_imports` does; what needs torch imports this module first, before all that imports torch."""

from hyperfl_flwr.core.quick_imports import quick_imports

with quick_imports():
    import torch  # noqa: F401
