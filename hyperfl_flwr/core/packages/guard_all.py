"""Refuse, on import, foreign packages named `clients`, `strategies` or `experiments`; see `guard_app`."""

from hyperfl_flwr.core.packages.package_guard import ALL, refuse_foreign_packages

refuse_foreign_packages(ALL)
