"""Deployments on machines of different owners: provision, check, run."""
