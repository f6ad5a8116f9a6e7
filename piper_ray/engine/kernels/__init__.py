"""Compiled inner loops of the engine. They use only arrays."""
