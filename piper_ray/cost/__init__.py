"""The time and memory of a stage."""
