"""Provision, check and run deployments on machines of different owners."""
