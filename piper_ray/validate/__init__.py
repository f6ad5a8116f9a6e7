"""Estimates against runs that others published: what a run says, its price in its own layout, errors by group.

``runs`` reads, ``layouts`` says what a run leaves unsaid, ``price`` prices and simulates one, ``table`` compares all.
"""
