"""Our own compact workload (TOML): layer types with their figures, and layers that name a type and their inputs.

    name = "two blocks"
    measured_threads = 4             # of the CPU that times were measured on, if so
    [cluster]                        # each may be given on the command line instead
    devices = 8
    microbatches = 64                # N, in a batch
    memory = "16GiB"
    bandwidth = "25GB/s"

    [types.block]
    name = "Block"                   # the name of layers of the type; left out: the type's own key
    experts = 8                      # how many its tokens are routed to, if it has experts
    key_heads = 8                    # of keys and values in its attention, if it has any
    predictor = false                # true for a layer of multi-token prediction
    inputs = ["30MiB", 8192]         # c: bytes of each input, in order; one size applies to every input
    tmpcs = [                        # one row for each TMPC; a list of degrees means equal rows
      { t = 1, id = "vanilla", time_s = 0.03, weights = "160MiB", activation = 606478336, fixed = 353994240 },
      { t = [2, 4], id = "vanilla", time_s = [0.019, 0.018], forward_sync = "30MiB", backward_sync = "30MiB" },
    ]

    [layers]                         # ids are 0, 1, ... in this order; after an explicit ``id`` they count on from it
    mask  = { type = "mask" }
    first = { type = "block", inputs = ["embedding", "mask"] }
    stack = { continues = "first", length = 32, inputs = ["previous", "mask"] }

    [graph]                          # more edges, after those of ``inputs``; each with its own cost
    edges = [{ from = "mask", to = "head", bytes = 8192 }]
    tensors = [{ layers = ["first", "stack", "head"], forward = "30MiB", backward = "30MiB" }]

    [batch]                          # the content of a microbatch, for speeds in samples and tokens
    samples_per_microbatch = 2
    tokens_per_sample = 1024
    schedule = "1f1b"                # of the plans; left out: Piper's. chunks = 2: stages on each rank;
                                     # group = 8: microbatches that pass through a chunk before the next

    [schemes]                        # TMPCs found from operators, in full, by the words of their ids; see ``schemes``
    scheme-0a1b2c3d = { layer = "block", tensor_parallel_degree = 2, border = "s" }

    [model]                          # the trained model, and how it is trained, for launch files; see ``surroundings``
    precision = "bf16"
    config = { model_type = "llama", hidden_size = 4096 }

A row's ``time_s`` is p for each sample; a list is a series of measurements that the layers of the type take in turn,
starting again if there are more layers than figures. ``forward_s`` and ``backward_s`` are the passes that make it up:
any two of the three determine the third, and ``time_s`` may stand alone; ``weight_s`` is the part of the backward pass
that computes gradients of weights. ``weights`` (w), ``activation`` (a), ``fixed`` (b), ``shared`` (divided among the
replicas of a stage), ``forward_sync`` (fw, one size or one for each edge that arrives) and ``backward_sync`` (bw, one
size or one for each edge that leaves, in the order of the edges) are bytes, 0 if left out. ``recompute`` is true or
false; if left out, the id determines it. ``least_data_parallel_degree``: only stages with at least this many replicas
may use the row, 1 if left out. A tensor of [graph] names the layers that make or use it: a stage with some but not all
of these sends or receives it once, ``forward`` bytes in the forward pass and ``backward`` bytes in the backward pass;
the bytes of edges are charged for each edge.

``continues`` makes a chain: layers of the same type follow the named one until the chain has ``length`` layers;
"previous" is the layer before in the chain, and the chain's own label means its last layer.

A layer's ``path`` is the module's name in the user's model; that of a chain is a list, or one text in which {1} means
1, 2, ... from the first layer that the entry adds. ``tied`` is a name for weights that the entry's layers share with
all others of that name, such as an embedding that is also the head's projection. ``links`` of [cluster] are those
within smaller groups of devices, such as ``[{ devices = 8, bandwidth = "900GB/s" }]``; ``bandwidth`` belongs to the
link that joins all. ``uplink`` of one is what all devices of its group together send out of it and receive; without
it each has a link of its own there. Replicas of a stage that lie within a group have its link, and so have stages of a
plan that does. ``devices_per_node`` of [cluster]: the devices of a node, on which a launcher starts processes, if the
first link joins several nodes.

Devices of several kinds are [[cluster.kinds]] tables, each with a ``name``, ``devices``, ``memory``, ``bandwidth`` and
``links`` of its own, and ``between`` of [cluster] is the rate between stages on different kinds. Each row then names
the ``kind`` of its devices.

``sites`` of [cluster], such as ``["east", "west"]``, are equal sites that the devices are at. ``links`` and
``bandwidth`` are those within a site. Each site has pipelines of its own, an equal part of each stage's replicas, and
gradients are summed over ``between``, the rate of a device between sites. A larger site is named once for each of its
equal parts: ``["east", "east", "west"]``.

``base = "other.toml"`` starts from another file, whose entries this file's entries replace one by one. Its path is
relative to this file's folder, or to the working folder for text from stdin.
"""

from __future__ import annotations

from pydantic import Field

from piper_ray.model import limits
from piper_ray.workloads.formats import fields
from piper_ray.workloads.formats.surroundings import paths_in

PREVIOUS = "previous"
TABLES = ("cluster", "batch", "types", "layers", "graph")
PATHS = paths_in("toml")
"""The paths of a workload's values other than the graph."""

KEYS = frozenset({"base", PATHS["measured_threads"], *TABLES})


_Times = fields.OneOrSome[fields.Figure]
_Sizes = fields.OneOrMany[fields.Size]

TIMES_WORDS = fields.FIGURE_WORDS + " (seconds per sample), or a list of them"
_SYNC_WORDS = fields.SIZE_WORDS + ", or a list of one for each edge that "


class Row(fields.Closed):
    """A TMPC of a layer type, for one degree or for several with equal figures."""

    t: fields.OneOrSome[fields.Degree] = Field(description=fields.DEGREE_WORDS + ", or a list of them")
    id: str = Field(description="a text")
    time_per_sample_s: _Times | None = Field(default=None, alias="time_s", description=TIMES_WORDS)
    forward_s: _Times | None = Field(default=None, description=TIMES_WORDS)
    backward_s: _Times | None = Field(default=None, description=TIMES_WORDS)
    weight_s: _Times | None = Field(default=None, description=TIMES_WORDS)
    weights_bytes: fields.Size = Field(default=0.0, alias="weights")
    activation_bytes: fields.Size = Field(default=0.0, alias="activation")
    fixed_bytes: fields.Size = Field(default=0.0, alias="fixed")
    forward_sync_bytes: _Sizes = Field(default=0.0, alias="forward_sync", description=_SYNC_WORDS + "arrives")
    backward_sync_bytes: _Sizes = Field(default=0.0, alias="backward_sync", description=_SYNC_WORDS + "leaves")
    recompute: bool | None = Field(default=None, description="true or false")
    shared_bytes: fields.Size = Field(default=0.0, alias="shared")
    least_data_parallel_degree: fields.Degree = 1
    kind: str = Field(default="", description="the name of a kind of devices")

    @property
    def degrees(self) -> tuple[int, ...]:
        return tuple(self.t) if isinstance(self.t, list) else (self.t,)


def name_in_rows(field: str) -> str:
    """The name of a TMPC's field in rows."""
    return Row.model_fields[field].alias or field


TIMES = ("time_per_sample_s", "forward_s", "backward_s", "weight_s")
"""Fields with figures of their own for each layer of a type."""


class LayerType(fields.Closed):
    """A type of layers; layers refer to it by its key."""

    name: str | None = Field(default=None, description="a text")
    inputs: _Sizes = Field(default=0.0, description=fields.SIZE_WORDS + ", or a list of one for each input")
    experts: fields.Count | None = None
    key_heads: fields.Count | None = None
    predictor: bool = Field(default=False, description="true or false")
    tmpcs: list[Row] = Field(min_length=1, description="a list of at least one TMPC row")


class Entry(fields.Closed):
    """One entry of [layers]: a layer of a type, or (``continues`` and ``length``) the rest of a chain."""

    type: str | None = Field(default=None, description="the key of a layer type")
    continues: str | None = Field(default=None, description="the label of an earlier layer")
    length: int | None = Field(
        default=None, ge=1, le=limits.LAYERS, description=f"a whole number from 1 to {limits.LAYERS}"
    )
    inputs: list[str] | None = Field(default=None, description="a list of labels of layers")
    id: fields.LayerId | None = None
    path: fields.OneOrMany[str] = Field(default="", description="a text, or a list of one for each layer")
    tied: str = Field(default="", description="a text")


class DrawnEdge(fields.Closed):
    """An edge between the last layers of two entries, with its cost."""

    source: str = Field(alias="from", description="a label of [layers]")
    target: str = Field(alias="to", description="a label of [layers]")
    cost_bytes: fields.Size = Field(alias="bytes", description=fields.SIZE_WORDS)


class DrawnTensor(fields.Closed):
    """A tensor with the last layers of some entries as its ends."""

    layers: list[str] = Field(description="a list of labels of [layers]")
    forward: fields.Size = 0.0
    backward: fields.Size = 0.0


class GraphTable(fields.Closed):
    """The [graph] table: edges and tensors in addition to the layers' inputs."""

    edges: list[DrawnEdge] = Field(default=[], description="a list of edges")
    tensors: list[DrawnTensor] = Field(default=[], description="a list of tensors")
