"""Readers, one module per source of samples."""
