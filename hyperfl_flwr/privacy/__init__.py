"""What a client does to its upload before it leaves."""
