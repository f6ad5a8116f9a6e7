"""Workloads from a PyTorch model: a user's factory makes it, its layers are found, timed and weighed on this machine.

``factory`` makes the model, ``tracer`` follows its forward pass, ``graph`` says which modules are layers, cuts the pass
at them and tells equal ones, ``passes`` measures one, ``store`` keeps what was measured, ``session`` goes through all
layers; ``build`` makes figures for t devices, and the instance. Only this package imports torch. In the planner's
words:

- a sample is one microbatch; p is the median of its forward and backward pass through a layer, measured;
- a is what autograd keeps of a microbatch between them (with recomputation: the layer's inputs), b the state of the
  parameters; w is the bytes of gradients; a tensor that its layer and its reader keep counts in both;
- one layer at a time is recomputed: what that needs is set aside from M once, not once a layer;
- c of an edge is the size of its tensors, half of it where no gradient comes back; inputs of the model cost nothing;
- what stands between layers in a forward pass belongs to the last layer that it reads; what reads only the model's
  inputs is done again by each layer that needs it.

Not in it: the loss, a batch's flush and optimizer step, loading of data. Weights that layers share count in each.
"""
