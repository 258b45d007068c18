"""PRIV-HFL's dual averaging on toy problems: convergence and cost."""
