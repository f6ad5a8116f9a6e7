"""A ledger of published runs with a pipeline: each layout beside the best plan under its runtime's rules."""
