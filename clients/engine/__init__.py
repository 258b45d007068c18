"""The machinery of all clients: parameter groups, private state, Flower's messages."""
