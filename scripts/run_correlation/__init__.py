"""Plans trained on this machine's cores against what their simulations promise: behind docs/correlation.md."""
