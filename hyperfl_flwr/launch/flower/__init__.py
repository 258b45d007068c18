"""Flower's own commands and engine: their environment, private SuperLinks, submitted runs."""
