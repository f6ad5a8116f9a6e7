"""Who does the work of an evaluation: threads of this process, or a Ray cluster."""
