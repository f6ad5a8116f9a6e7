"""Workloads from a PyTorch model: a user's factory makes the model; its layers are found, timed and weighed on this
machine.

``factory`` makes the model, ``tracer`` follows its forward pass, ``graph`` decides which modules are layers, cuts the
pass at them and recognises equal ones, ``passes`` measures a layer, ``store`` keeps measured figures, ``session`` goes
through all layers; ``build`` makes figures for t devices, and the instance. Only this package imports torch. In the
planner's words:

- a sample is one microbatch; p is the measured median of its forward and backward pass through a layer;
- a is what autograd keeps of a microbatch between the passes (with recomputation: the layer's inputs), b the state of
  the parameters; w is the bytes of gradients; a tensor kept by its layer and by its reader counts in both;
- only one layer at a time is recomputed, so the memory for that is subtracted from M once, not once per layer;
- c of an edge is the size of its tensors, half of it if no gradient comes back; inputs of the model cost nothing;
- operations between layers belong to the last layer that they read; operations that only read the model's inputs are
  repeated by each layer that needs them.

It does not cover the loss, a batch's flush and optimizer step, or loading of data. Shared weights count in each layer.
"""
