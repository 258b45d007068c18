"""The Flower app: where both sides of a method meet."""
