"""Property inference as a game: the share of one class among a client's training samples."""
