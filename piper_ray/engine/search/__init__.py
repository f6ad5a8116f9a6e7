"""The search for the least threshold: the bracket, the plan made from an evaluation, and why there is no plan."""
