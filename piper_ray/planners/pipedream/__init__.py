"""PipeDream's own planner (Narayanan et al., SOSP 2019)."""
