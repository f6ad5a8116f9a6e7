"""Plain data, validated: the problem, its answers, and what is said on the way. Imports nothing of the rest."""
