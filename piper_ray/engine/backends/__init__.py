"""Workers that evaluate: threads of this process, or a Ray cluster."""
