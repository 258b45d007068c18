"""Novel clients on their nodes: answers to the server's queries, and models on demand."""
