"""Many points solved into a Parquet dataset."""
