"""Layers that need special treatment: normalisation and dropout."""
