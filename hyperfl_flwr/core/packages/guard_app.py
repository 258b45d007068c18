"""Refuse, on import, foreign packages named `clients` or `strategies`, before any of their code runs.

Every module of `hyperfl_flwr` that imports one of these packages imports this module first, since a program may start
with any module. Modules that also import `experiments`, which Flower's app bundle lacks, use `guard_all`.
"""

from hyperfl_flwr.core.packages.package_guard import APP, refuse_foreign_packages

refuse_foreign_packages(APP)
