"""What a stage takes and holds: the formulas that planners use. Each module has one part of them."""
