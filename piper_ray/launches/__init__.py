"""Reads users' launch files: what they set. Nothing in them is executed."""
