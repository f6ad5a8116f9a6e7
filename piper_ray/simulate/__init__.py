"""A discrete-event simulation of any plan under any schedule: the independent judge of what a plan delivers.

From the instance and the plan alone: action lists, dependencies, transfers, all-reduce and optimizer; none of the
planner's formulas.
"""
