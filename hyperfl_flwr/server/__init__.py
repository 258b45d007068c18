"""The server's exchange with nodes: handshake, membership, requests, replies."""
