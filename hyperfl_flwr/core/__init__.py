"""Foundation: errors, randomness, files, versions; imports nothing above it."""
