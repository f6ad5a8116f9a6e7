"""Optima for every number of devices, and for every bound on the sum of d."""
