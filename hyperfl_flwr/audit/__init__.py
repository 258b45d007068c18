"""Records a round and attacks it with what the server has."""
