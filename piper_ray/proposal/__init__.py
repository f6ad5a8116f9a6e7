"""From a model's config and a cluster to the plan that a runtime should run: one search over all that launches say."""
