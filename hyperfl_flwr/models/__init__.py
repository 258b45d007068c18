"""Networks: the targets that clients use, and the hypernetwork that generates their weights."""
