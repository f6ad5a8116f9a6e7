"""Corrects the constants of an estimate by measured steps and layers: those few constants that the measurements
determine."""
