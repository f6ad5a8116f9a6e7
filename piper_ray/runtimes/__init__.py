"""What each runtime can run: schedules, rules for a plan, the pieces it cuts a model into, its order of ranks."""
