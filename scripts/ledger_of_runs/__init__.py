"""A ledger of published runs with a pipeline: each layout compared with the best plan under its runtime's rules."""
