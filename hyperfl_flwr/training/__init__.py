"""Local training of the methods, and related computations, in plain torch."""
