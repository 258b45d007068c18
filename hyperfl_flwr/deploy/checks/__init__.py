"""What `hyperfl deploy check` checks, on the operator's machine and on a node's."""
