"""Metrics as sums that merge exactly: over batches, over clients, over nodes."""
