"""Packages: quick imports, code of the user's own, guards against foreign packages, versions."""
