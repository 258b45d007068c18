"""Target networks on a frozen, pre-trained body, with small trainable adapters (HyperFL-LPM)."""
