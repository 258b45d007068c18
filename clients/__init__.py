"""The clients' side of each method: Flower NumPyClients."""
