"""The exact solver: lattice, tables, evaluations of thresholds, the search over them, and the workers."""
