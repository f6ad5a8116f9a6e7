"""Whether a change of the solver leaves every answer as it was."""
