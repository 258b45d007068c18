"""Data sets, their partition among clients, and the data of each client."""
