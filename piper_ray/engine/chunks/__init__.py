"""Plans under schedules with chunks on each rank, or a split backward pass: bounds by duality, plans by moves."""
