"""Files on disk: replaced atomically, appended to, locked, and read with checks."""
