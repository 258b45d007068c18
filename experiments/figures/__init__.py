"""Draw the figures of studies."""
