"""Compiled inner loops of the check. They use arrays only, and no code of the solver."""
