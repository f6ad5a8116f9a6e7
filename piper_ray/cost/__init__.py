"""What a stage takes and holds."""
