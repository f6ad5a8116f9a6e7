"""Lattices that outgrow one machine: each holds some of the downsets, and their states."""
