"""Importing this module refuses foreign packages named `clients` or `strategies`, before any of their code runs.

Each module of `hyperfl_flwr` that imports one of them imports this first, since a program may import any module first.
`guard_all` is for modules that import `experiments`, too, which Flower's app bundle does not hold.
"""

from hyperfl_flwr.core.package_guard import APP, refuse_foreign_packages

refuse_foreign_packages(APP)
