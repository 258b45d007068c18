"""Measurements of speed, run by `make bench`; nothing here decides whether a test passes."""
