"""Files on any storage that survive faults: folders, leases and claims, whole writes. For checkpoints and sweeps."""
