"""Exact planning: the searches, and the tables that they work on."""
