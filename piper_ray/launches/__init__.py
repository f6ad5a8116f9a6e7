"""Files by which people launch a training, read: what they set, with nothing of them executed."""
