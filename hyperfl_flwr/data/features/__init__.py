"""Turn images with users into a file of feature vectors, for `hyperfl features`."""
