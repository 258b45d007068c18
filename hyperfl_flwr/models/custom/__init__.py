"""User-supplied target networks: import, checks, provenance."""
