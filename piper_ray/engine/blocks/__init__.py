"""Operator-level graphs: layers merged into blocks, so that a graph too wide to plan layer by layer is planned."""
