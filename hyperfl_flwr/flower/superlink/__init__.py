"""What Flower has no command for: a SuperLink's database and its API for nodes. It does not travel to nodes."""
