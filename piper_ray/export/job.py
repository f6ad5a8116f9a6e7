"""The figures of a plan that all writers of exports need: degrees, stages in pieces, recomputation, batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from piper_ray.model.constraints import (
    FilledPipeline,
    TensorParallelDegrees,
    WholeExpertGroups,
    WholeNodesAtSites,
    choices_made,
)
from piper_ray.model.errors import UnsupportedPlan
from piper_ray.model.figures import printable
from piper_ray.model.instance import Instance, Tmpc
from piper_ray.model.mode import ALL_REPLICAS, OF_RUNTIMES, Mode, Recomputation, Sharding, found_schemes, share_of
from piper_ray.model.plan import Plan
from piper_ray.model.plan_rules import layers_in_order
from piper_ray.model.schedule import Schedule
from piper_ray.runtimes.meshes import Mesh, domain_of, meshes_of, node_sizes, shared_groups
from piper_ray.runtimes.pieces import ModelPieces, pieces_of
from piper_ray.runtimes.runtime import Runtime
from piper_ray.simulate.actions import group_size
from piper_ray.simulate.stages import stages_of
from piper_ray.workloads.estimate.exchanges import dispatcher_of
from piper_ray.workloads.estimate.software import Software, TokenDispatcher, load_software


@dataclass(frozen=True)
class ExportJob:
    """A plan that a runtime can run: with one d and one t, layers in order, and a schedule of the runtime.

    Figures that layouts also state have the names of ``RunAs``, which runtimes' tables use to write and read them.
    """

    instance: Instance
    plan: Plan
    schedule: Schedule
    runtime: Runtime
    gpus_per_node: int

    @cached_property
    def meshes(self) -> tuple[Mesh, ...]:
        """The nodes of the ranks."""
        cluster = self.instance.cluster
        return meshes_of(self.plan, self.schedule, node_sizes(self.instance, self.gpus_per_node), cluster)

    @property
    def shared_groups(self) -> list[dict[str, Any]]:
        """Groups of GPUs of a kind whose place in the list of nodes counts, as they are not all full: how many GPUs
        they have, how many pipeline ranks each of them (0: a part of one), how many of these the first, and how many
        GPUs are idle in each."""
        of_kinds = Counter(stage.kind for stage in self.plan.stages)
        return [
            {"kind": kind, "gpus": gpus, "ranks": shared, "first": ranks % (shared or 1) or shared, "idle": gpus - used}
            for kind, ranks in of_kinds.items()
            for gpus, used, shared in shared_groups(self.plan, self.schedule, self.instance.cluster, kind)
            if ranks > shared and (ranks % (shared or 1) or gpus > used)
        ]

    @property
    def nodes_at_sites(self) -> str:
        """``2 at east, the next 2 at west``: the sites of each pipeline rank's nodes, if there are several."""
        mesh, sites = self.meshes[0], self.instance.cluster.sites
        each = mesh.nodes // mesh.ranks // max(1, len(sites))
        return ", the next ".join(f"{count * each} at {printable(site)}" for site, count in Counter(sites).items())

    @property
    def data_parallel(self) -> int:
        """d, of all stages."""
        return self.plan.stages[0].data_parallel_degree

    @property
    def replica_devices(self) -> int:
        """The devices of a stage's replica: t times the groups that share a sequence; with several kinds, the largest
        number."""
        return max(stage.tensor_parallel_degree for stage in self.plan.stages)

    @property
    def tensor_parallel(self) -> int:
        """t of all stages, in each of the groups that share a sequence; with several kinds, the largest."""
        return self.replica_devices // self.context_parallel

    @property
    def weight_replicas(self) -> int:
        """The number of ranks with the same weights: d c."""
        return self.data_parallel * self.context_parallel

    @property
    def context_parallel(self) -> int:
        """The number of groups that share a sequence, each with t devices."""
        return self.setting.context

    @property
    def sequence_parallel(self) -> bool:
        """Whether all layers that have the choice run with sequence parallelism."""
        return self.setting.sequence_parallel

    @property
    def optimizer_shards(self) -> int:
        """The number of replicas that divide the optimizer's state."""
        return self.setting.optimizer_shards

    @property
    def optimizer_on_host(self) -> bool | None:
        """True if the optimizer's state is in host memory; else None."""
        return (self.instance.model is not None and self.instance.model.optimizer_on_host) or None

    @cached_property
    def experts(self) -> int:
        """The largest number of experts of a layer; 0 if no layer has any."""
        return max(layer.experts for layer in self.instance.layers)

    @property
    def expert_parallel(self) -> int | None:
        """The ranks that experts are spread over, independent of t or the t devices themselves; None if the model has
        no experts."""
        if self.setting.experts is not None:
            return self.setting.experts
        return self.tensor_parallel if self.experts else None

    @property
    def expert_tensor(self) -> int:
        """The number of ranks that share an expert."""
        return self.setting.expert_tensor

    @property
    def dispatcher(self) -> TokenDispatcher | None:
        """How tokens reach experts in the plan's times; None if the model is unknown or has no experts."""
        model, ranks = self.instance.model, (self.expert_parallel or 1) * self.expert_tensor
        if model is None or not self.experts:
            return None
        return TokenDispatcher.ALL_TO_ALL if ranks == 1 else dispatcher_of(model, ranks)

    @property
    def overlaps_experts(self) -> bool | None:
        """True if the plan's times assume that exchanges of experts overlap with passes, and Megatron can overlap them;
        else None."""
        model = self.instance.model
        able = self.pipeline_ranks == 1 or self.schedule.v > 1
        return (model is not None and model.expert_overlap and able and (self.expert_parallel or 1) > 1) or None

    @property
    def links_join_nodes(self) -> bool:
        """Whether the fast link joins several nodes (NVL72)."""
        return domain_of(self.instance, self.gpus_per_node) > self.gpus_per_node

    @property
    def dispatch_package(self) -> str:
        """What a node needs for DeepEP or HybridEP: AMD's port is a part of Primus-Turbo (its docs/examples.md)."""
        model = self.instance.model
        if model is not None and model.gpu.startswith("MI"):
            return "Primus-Turbo, which has AMD's port (Primus with Megatron: enable_primus_turbo, use_turbo_deepep)"
        return "the package deep_ep"

    @property
    def blocks(self) -> int:
        """The number of the model's blocks. Raises UsageError for a model that does not consist of embedding, blocks
        and head."""
        return self.pieces.blocks

    @property
    def predictors(self) -> int | None:
        """The number of layers that predict further tokens; None if there are none."""
        return self.pieces.predictors or None

    @property
    def tokens_per_sample(self) -> int | None:
        """The tokens of a sample; None if unknown."""
        return self.instance.batch.tokens_per_sample

    @property
    def group(self) -> int | None:
        """Microbatches that pass through a chunk before the next; None if their number is that of the pipeline
        ranks."""
        found = group_size(self.pipeline_ranks, self.microbatches, self.schedule.group) if self.schedule.v > 1 else None
        return None if found == self.pipeline_ranks else found

    @property
    def software(self) -> Software | None:
        """The software of the workload's times; None if unknown, or not in our table."""
        return None if self.instance.model is None else load_software().get(self.instance.model.software)

    @property
    def hides_tensor_exchanges(self) -> bool:
        """Whether the plan's times assume that a share of tensor parallelism's exchanges is hidden."""
        software = self.software
        return software is not None and self.tensor_parallel > 1 and software.forward_overlap > 0.0

    @property
    def shards_in_groups(self) -> bool:
        """Whether replicas divide weights, which runtimes can do within groups of replicas (HSDP)."""
        return self.setting.sharding is Sharding.WEIGHTS

    @property
    def pipeline_ranks(self) -> int:
        """p: the ranks of a pipeline."""
        return len(self.plan.stages) // self.schedule.v

    @property
    def ranks(self) -> int:
        """The number of ranks of the whole job: d t c p."""
        return sum(mesh.devices for mesh in self.meshes)

    @property
    def microbatches(self) -> int:
        """m: the microbatches of a replica."""
        return self.instance.microbatches // self.data_parallel

    @property
    def microbatch_samples(self) -> int:
        """The samples of a microbatch; 1 if unknown."""
        return self.instance.batch.samples_per_microbatch or 1

    @property
    def global_batch_samples(self) -> int:
        """The samples of a step, over all replicas."""
        return self.instance.microbatches * self.microbatch_samples

    @property
    def processes_per_node(self) -> int:
        """The processes of a node, equal to its number of GPUs; some nodes may have fewer."""
        return max(mesh.processes_per_node for mesh in self.meshes)

    @property
    def nodes(self) -> int:
        """The number of nodes, which ranks fill one after the other."""
        return sum(mesh.nodes for mesh in self.meshes)

    @property
    def torchrun(self) -> str:
        """The command up to the script, for a shell on each node.

        On several nodes the shell stops with a message if NODE_RANK or MASTER_ADDR is not set, because a process that
        took itself for the first one would wait for the others for ever. The last node of a mesh, or of each part of
        it, may have fewer processes.
        """
        if self.nodes == 1:
            return f"torchrun --standalone --nproc-per-node {self.processes_per_node}"
        usual = self.meshes[0].processes_per_node
        processes = str(usual)
        own = "${NODE_RANK:?}"
        for mesh in self.meshes:
            if mesh.processes_per_node != usual:
                usual = mesh.processes_per_node
                processes = f"{own} >= {mesh.first_node} ? {usual} : {processes}"
            if mesh.uneven_part:
                place = f"({own} - {mesh.first_node})" if mesh.first_node else own
                processes = (
                    f"{place} % {mesh.nodes_of_part} == {mesh.nodes_of_part - 1} ? {mesh.uneven_part} : {processes}"
                )
            if mesh.processes_of_last_node < usual and not (mesh.uneven_part and mesh.devices % mesh.part == 0):
                processes = f"{own} == {mesh.last_node} ? {mesh.processes_of_last_node} : {processes}"
        if not processes.isdecimal():
            processes = f"$(({processes}))"
        return (
            f'torchrun --nnodes {self.nodes} --nproc-per-node {processes} --node-rank "${{NODE_RANK:?from 0}}" '
            '--master-addr "${MASTER_ADDR:?the address of node 0}" --master-port "${MASTER_PORT:-29500}"'
        )

    @cached_property
    def tmpcs(self) -> dict[int, Tmpc]:
        """The TMPCs by layer id, in the order of stages and of layers within them."""
        return {layer: tmpc for stage in self.plan.stages for layer, _, tmpc in choices_made(self.instance, stage)}

    @cached_property
    def _rows(self) -> dict[int, tuple[Tmpc, ...]]:
        """The TMPCs that each layer may have in its stage."""
        return {layer: row for stage in self.plan.stages for layer, row, _ in choices_made(self.instance, stage)}

    @cached_property
    def setting(self) -> Mode:
        """The mode that all layers share: a property counts if some layer has it, since all others with the choice then
        have it too. Recomputation: see ``recomputed``."""
        found = [tmpc.mode for tmpc in self.tmpcs.values()]
        sharded = max(found, key=lambda one: one.shares)
        spread = next((one for one in found if one.experts is not None), found[0])
        context = max(one.context for one in found)
        everywhere = sharded.optimizer_shards == ALL_REPLICAS
        return Mode(
            sequence_parallel=any(one.sequence_parallel for one in found),
            optimizer_shards=self.data_parallel * context if everywhere else sharded.optimizer_shards,
            offload=any(one.offload for one in found),
            context=context,
            experts=spread.experts,
            expert_tensor=spread.expert_tensor,
            sharding=sharded.sharding,
            gathered=any(one.gathered for one in found),
        )

    def in_order(self, layers: Iterable[int]) -> tuple[int, ...]:
        """Layer ids in the model's order."""
        return tuple(sorted(layers, key=self._place.__getitem__))

    @cached_property
    def _place(self) -> dict[int, int]:
        return {layer: index for index, layer in enumerate(layers_in_order(self.instance))}

    def recomputation_of(self, layer: int) -> Recomputation:
        """The recomputation of a layer, by the layer's id."""
        return self.tmpcs[layer].mode.recomputation

    def _choices(self, layer: int) -> list[Recomputation]:
        """The recomputation of each of the layer's TMPCs."""
        return [tmpc.mode.recomputation for tmpc in self._rows[layer]]

    @cached_property
    def recomputed(self) -> tuple[tuple[Recomputation, ...], ...]:
        """The recomputation of each stage, for its layers that have the choice, in the model's order."""
        return tuple(
            tuple(
                self.recomputation_of(layer)
                for layer in self.in_order(stage.layers)
                if len(set(self._choices(layer))) > 1
            )
            for stage in self.plan.stages
        )

    @cached_property
    def recomputation(self) -> Recomputation | None:
        """The common recomputation of all layers that have the choice, where each does the parts of it that it has;
        None if they differ."""
        kinds = {kind for stage in self.recomputed for kind in stage} or {Recomputation.NONE}
        if len(kinds) == 1:
            return kinds.pop()
        union = Recomputation.of_parts(part for kind in kinds for part in kind.parts)
        alike = all(share_of(union, self._choices(layer)) == self.recomputation_of(layer) for layer in self.tmpcs)
        return union if alike else None

    @property
    def first_recomputed(self) -> tuple[int, ...] | None:
        """For each stage the number of layers that recompute in full, if these come first and the others keep
        everything."""
        counts = []
        for kinds in self.recomputed:
            count = kinds.count(Recomputation.FULL)
            if kinds != (Recomputation.FULL,) * count + (Recomputation.NONE,) * (len(kinds) - count):
                return None
            counts.append(count)
        return tuple(counts)

    @cached_property
    def pieces(self) -> ModelPieces:
        """The model's pieces. Raises UsageError for a model that does not consist of embedding, blocks and head."""
        return pieces_of(self.instance)

    @cached_property
    def pieces_of_stages(self) -> tuple[tuple[int, ...], ...]:
        """The pieces of each stage. Ends without layers belong to the outer stages. Raises UsageError if stages divide
        a piece."""
        stages = [list(stage) for stage in self.pieces.of_stages(self.plan)]
        stages[0] = sorted({0, *stages[0]})
        stages[-1] = sorted({self.pieces.head, *stages[-1]})
        return tuple(map(tuple, stages))

    @cached_property
    def rank_of_stage(self) -> tuple[int, ...]:
        """The pipeline rank of each stage."""
        p = self.pipeline_ranks
        rank_of = {stage: rank for rank in range(p) for stage in self.schedule.stages_of_rank(rank, p)}
        return tuple(rank_of[stage] for stage in range(len(self.plan.stages)))

    @cached_property
    def tied_over_ranks(self) -> tuple[tuple[int, ...], ...]:
        """Groups of layers with shared weights on different ranks of a pipeline."""
        rank_of = zip(self.rank_of_stage, self.plan.stages, strict=True)
        ranks = {layer: rank for rank, stage in rank_of for layer in stage.layers}
        return tuple(
            layers for layers in self.instance.tied_layers.values() if len({ranks[layer] for layer in layers}) > 1
        )

    @property
    def tied_text(self) -> str:
        """``model.embed_tokens and lm_head have a weight in common, on different pipeline ranks``; empty if there are
        none."""
        texts = (" and ".join(self.named(layer) for layer in layers) for layers in self.tied_over_ranks)
        found = "; ".join(texts)
        return found and f"{found} have weights in common, on different pipeline ranks"

    def named(self, layer: int) -> str:
        """A layer's name in messages: its path, or else its name."""
        found = self.instance.layer_by_id[layer]
        return printable(found.path or found.name)


def make_job(instance: Instance, plan: Plan, schedule: Schedule, runtime: Runtime, gpus_per_node: int) -> ExportJob:
    """The job of a plan. Raises UsageError for a schedule that the runtime does not have, InvalidPlan with every rule
    that is broken, and UnsupportedPlan with everything that the runtime cannot run.
    """
    runtime.require_schedule(schedule.name)
    plan.require_one_pipeline(f"launch files for {runtime.title}")
    stages_of(instance, replace(plan, keeps_order=True), schedule)  # raises if a rule is broken
    job = ExportJob(instance, plan, schedule, runtime, gpus_per_node)
    unsupported = [*runtime.same_degrees(instance).violations(instance, plan)] or [*_unsupported(job)]
    if unsupported:
        raise UnsupportedPlan(runtime.title, unsupported)
    return job


def _unsupported(job: ExportJob) -> Iterator[str]:
    """Yields what a runtime does not support in a plan with one d and one t."""
    instance, plan, runtime = job.instance, job.plan, job.runtime
    degrees, ranks = sorted({stage.tensor_parallel_degree for stage in plan.stages}), job.pipeline_ranks
    words = found_schemes(one.id for one in job.tmpcs.values())
    if found := [word for word in words if instance.schemes.get(word, {}).get("name") not in OF_RUNTIMES]:
        yield f"schemes found from layers' operators ({', '.join(found)}), which no runtime here takes yet"
    for constraint in runtime.constraints(instance, job.schedule.name, domain_of(instance, job.gpus_per_node)):
        if isinstance(constraint, FilledPipeline):
            yield from constraint.violations(instance, plan.by_rank(job.schedule))
        elif isinstance(constraint, TensorParallelDegrees):
            allowed = ", ".join(map(str, constraint.degrees))
            yield from (
                f"tensor-parallel degree {t}, not one of {allowed}" for t in degrees if t not in constraint.degrees
            )
    if ranks > 1 and (alone := runtime.on_one_rank(instance)) is not None:
        yield f"{alone}; this plan has {ranks} ranks"
    if job.schedule.v > 1 and ranks == 1:
        yield f"{job.schedule.v} chunks on a single rank are no pipeline; such a plan is one of one stage"
    yield from replace(runtime.setting, by_layer=True).violations(instance, plan)
    yield from WholeExpertGroups().violations(instance, plan)
    if sites := instance.cluster.sites:
        yield from WholeNodesAtSites(len(sites), job.gpus_per_node).violations(instance, plan)
    for kind, node in node_sizes(instance, job.gpus_per_node).items():
        nodes = sum(mesh.nodes for mesh in job.meshes if mesh.kind == kind)
        if kind and nodes * node > instance.cluster.of_kind(kind).devices:
            yield f"stages on {kind} that do not follow each other, on {nodes} nodes of {node}: there are fewer"
