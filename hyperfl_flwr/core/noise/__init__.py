"""Noise for differential privacy, drawn from the operating system's random numbers."""
