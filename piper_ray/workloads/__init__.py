"""Where instances come from: files, estimates from a model's config, measurements of a PyTorch module."""
