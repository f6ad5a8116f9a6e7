"""A study of plans on a cluster of isolated machines, and the page about it."""
