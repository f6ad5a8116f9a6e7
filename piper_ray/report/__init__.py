"""What a user sees of a solve: the log while it runs, the plan as tables, and the JSON document."""
