"""Compiled inner loops of the engine, on arrays alone."""
