"""Plans under schedules with several chunks on a rank, or a backward pass in two parts: bounds by duality, plans by moves."""
