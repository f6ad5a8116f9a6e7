"""Ways to run a layer on t devices, found from its operators: what is sharded where, kept, and computed again."""
