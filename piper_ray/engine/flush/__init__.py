"""Finds plans of least time under schedules with a flush: all stages have one d and one t."""
