"""Novel clients on the server: strategies assess and serve clients that were never trained."""
