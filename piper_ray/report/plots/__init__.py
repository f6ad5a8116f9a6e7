"""Plots, drawn without a display: each module returns matplotlib figures, ``style.save`` writes them."""
