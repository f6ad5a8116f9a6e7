"""Measured steps and layers correct an estimate's constants: the few that they can tell apart."""
