"""The solver against its yardsticks: goals, published figures, the paper's own table. ``scripts/bench --help``."""
