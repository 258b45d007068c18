"""The node's side, on the data owner's machine: cohort of clients, private state, ledger."""
