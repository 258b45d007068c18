"""Division of a data set among clients."""
