"""Files on any storage that survive faults: folders, leases and claims, atomic writes. Used by checkpoints and
sweeps."""
