"""Compiled inner loops of the check: they know arrays only, and nothing of the solver's."""
