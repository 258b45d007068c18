"""What a client computes in a round, in plain torch."""
