"""Certificates, which prove a bound, as files, and their check: from the instance alone, without the solver's code.

A certificate says that no plan is faster than its bound. It lists, for each tail of the pipeline that a plan within the
bound can have (a set of layers closed under successors), the least that such a tail takes: pairs of devices and sum of
d. The argument why that proves the bound is in ``check``.
"""
