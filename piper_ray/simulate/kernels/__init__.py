"""Compiled inner loops of a simulation; know arrays only."""
