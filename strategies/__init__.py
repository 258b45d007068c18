"""The server's side of each method: Flower strategies."""
