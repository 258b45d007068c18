"""Server side of each method, as Flower strategies."""
