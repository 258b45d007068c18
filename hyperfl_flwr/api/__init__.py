"""Python interface: start and resume runs, and use finished ones."""
