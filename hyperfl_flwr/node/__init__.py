"""The owner's machine: cohort of clients, private state, ledger."""
