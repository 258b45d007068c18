"""Layers that behave differently in a federation: normalisation and dropout."""
