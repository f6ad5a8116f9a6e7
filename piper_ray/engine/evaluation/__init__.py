"""Evaluates a threshold over the lattice: pruned, split among workers, and recorded."""
