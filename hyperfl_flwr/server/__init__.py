"""The server's exchange with nodes: handshake, roster, requests, replies."""
