"""Workloads from nothing: a model's config and the name of a GPU make an instance that can be planned.

``config`` finds the model, ``architectures`` makes its layers of operators, ``adapters`` freezes them and adds LoRA's,
``modes`` lists the ways to run a layer, ``roofline``, which counts its FLOP, ``exchanges`` and ``memory`` price one,
``costs`` adds them up to a TMPC, ``build`` puts the instance together; ``layout`` prices one given layout. ``runtimes``
says how memory is held besides that; ``hardware`` and ``software`` hold all other constants. In the planner's words:

- a sample is one microbatch; p is the s of its forward and backward pass, recomputation and the exchanges among t
  devices included, one after the other;
- a is what a microbatch in flight keeps, b the state of the parameters; one layer at a time is in its backward pass,
  and what that needs at the largest t is set aside from M once, not once a layer (what recomputation, an embedding or
  a vocabulary projection needs at a small t beyond that is in b);
- M is what programs find of a GPU's memory, less that and a reserve for CUDA's context, communicators and fragments;
- w is the bytes of gradients; B counts both directions of a GPU's link to the others, because the formulas count what
  goes out and what comes in: with it 4 (d-1)/d w / B is a ring's all-reduce, and 2 c / B a tensor and its gradient;
- c + fw and c + bw are what each of t devices sends of a tensor; c alone is that at the largest t.

Not in it: a batch's flush and optimizer step, loading of data, what several network links of a node can do for one
replica (``layout`` knows of these but for the data), and host memory.
"""
