"""Figures of a run's page and folder."""
