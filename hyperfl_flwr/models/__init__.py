"""Networks: target networks, which classify on clients, and hypernetworks, which generate their weights."""
