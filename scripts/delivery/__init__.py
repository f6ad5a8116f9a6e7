"""README's tables of large models: what Piper's schedule promises, what 1F1B delivers, and baselines."""
