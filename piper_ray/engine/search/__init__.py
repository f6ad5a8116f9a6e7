"""Thresholds until the bounds meet: the bracket, the plan behind an evaluation, why there is none."""
