"""The machinery of all strategies: sampling, replies, reduction, recording."""
