"""What proves a bound, as a file, and its check: from the instance alone, by code that shares nothing with the solver.

A certificate says that no plan is faster than its bound. It lists, for each tail of the pipeline that a plan within the
bound can have (a set of layers closed under successors), what such a tail takes at least: pairs of devices and sum of
data-parallel degrees. ``check`` has the argument why that proves the bound.
"""
