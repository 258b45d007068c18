"""Attacks of a server that follows the protocol and is curious: what one reply tells about a client's images."""
