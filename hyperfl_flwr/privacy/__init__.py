"""Protection of a client's uploads before they leave the node: clipping, noise, private means, rotation."""
