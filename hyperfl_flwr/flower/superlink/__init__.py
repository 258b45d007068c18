"""Access to a SuperLink's database and to its API for nodes; not in the app bundle that nodes receive."""
