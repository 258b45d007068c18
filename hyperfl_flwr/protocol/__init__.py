"""Format of the messages between server and nodes: arrays, requests, reports, queries, exact sums."""
