"""From a model's config and a cluster to the plan that a runtime should run, by one search over all that a launch says."""
