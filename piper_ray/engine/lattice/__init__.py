"""The downsets of a contracted layer graph: numbered, counted and listed."""
