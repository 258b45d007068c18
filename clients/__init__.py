"""Client side of each method, as Flower NumPyClients."""
