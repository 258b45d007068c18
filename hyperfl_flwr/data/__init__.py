"""Data sets, how they are shared out among clients, and what one client holds."""
