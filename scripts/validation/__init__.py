"""Prices published runs in their own layouts and compares: the tables of docs/estimates.md."""
