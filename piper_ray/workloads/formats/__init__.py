"""Inputs and outputs: Piper's JSON, our TOML workload, PipeDream's and dnn-partitioning's inputs, and plans."""
