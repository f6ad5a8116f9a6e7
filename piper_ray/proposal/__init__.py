"""From a model's config and a cluster to the plan that a runtime should run, over microbatch sizes and schedules."""
