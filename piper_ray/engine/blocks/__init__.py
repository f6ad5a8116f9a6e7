"""Plans by blocks of operators, for graphs that are too wide to plan layer by layer."""
