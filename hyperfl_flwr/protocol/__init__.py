"""What travels between server and nodes: messages, arrays, queries, exact sums."""
