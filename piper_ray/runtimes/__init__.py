"""What each runtime can run: its schedules, its rules for plans, the pieces of a model that it knows, its order of
ranks."""
