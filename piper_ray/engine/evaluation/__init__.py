"""One threshold evaluated over the lattice: pruned, scheduled, remembered."""
