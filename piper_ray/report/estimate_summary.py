"""What an estimate is, in words: the header of the file it is written to, and the lines on the screen."""

from __future__ import annotations

from piper_ray.model.cluster import Link
from piper_ray.model.figures import flop_text, given_size_text, memory_text, plural, size_text, time_text
from piper_ray.report.document import workload_text
from piper_ray.workloads.estimate.build import Estimate


def file_text(result: Estimate, command: str) -> str:
    """The workload as TOML under a header that says how to make it again and how to read it."""
    return workload_text(result.instance, header_lines(result, command))


def header_lines(result: Estimate, command: str) -> list[str]:
    """How the workload was made and what its figures are."""
    setting, gpu = result.setting, result.setting.gpu
    gradient_bytes = setting.training.gradient_bytes
    trained = "trained " if _adapted(result) else ""
    found, reserve = size_text(gpu.device_bytes, 3), size_text(setting.reserve_bytes, 3)
    return [
        f"{result.architecture.name} on {result.devices:,} GPUs ({gpu.name}), estimated by formulas and not measured:",
        f"  {command}",
        "(`--explain LAYER` shows how a figure comes about.)",
        *result.calibration.told,
        "",
        f"{_parameters_text(result)}. A microbatch: {result.architecture.sample};",
        f"{result.instance.microbatches:,} microbatches are a batch.",
        "",
        "TMPCs: plain; sp: sequence parallelism besides tensor parallelism; full: the backward pass computes the whole",
        f"layer again; selective: norms and activation functions, or the parts that follow it{_options_text(result)}.",
        "time_s         forward and backward pass of a microbatch on t GPUs, recomputation and exchanges included",
        "forward_s      the forward pass of it; weight_s: products of the backward pass that give gradients of weights",
        f"weights        what data parallelism synchronises: gradients, {gradient_bytes:g} bytes a {trained}parameter",
        "activation     what a microbatch in flight keeps",
        f"fixed          weights, gradients and optimizer state, {_state_text(result)}",
        f"inputs         a GPU's share of a tensor over t = {setting.largest_degree}",
        "forward_sync, backward_sync: its larger share at a smaller t, and gathering the shares within the node",
        f"memory         {found} that programs find, less {reserve} for CUDA's context, communicators and",
        f"               fragments, and less {size_text(setting.workspace_bytes, 3)} for one layer's backward pass",
        *(
            f"{'links' if link.devices else 'bandwidth':<13}  {_both_ways(link)} in and out together: {text} each way"
            for link, text in reversed(list(zip(result.instance.cluster.links, _link_texts(result), strict=True)))
        ),
    ]


def summary_lines(result: Estimate) -> list[str]:
    """What was estimated, and whether memory can be enough."""
    instance, architecture, gpu = result.instance, result.architecture, result.setting.gpu
    tmpcs = sum(len(of_degree) for layer in instance.layers for of_degree in layer.tmpcs.values())
    kinds = f"{len(instance.layers)} layers of {len(architecture.kinds)} kinds, {tmpcs:,} TMPCs"
    memory = memory_text(gpu.device_bytes)
    return [
        f"Model     {architecture.name}: {_parameters_text(result)}, {kinds}",
        f"Sample    {architecture.sample}; {instance.microbatches:,} microbatches in a batch",
        f"Cluster   {result.devices:,} x {gpu.name}, {memory} found",
        f"Links     {_links_line(result)}",
        _work_line(result),
        memory_line(result),
    ]


def _work_line(result: Estimate) -> str:
    """FLOP of a step by the usual definitions, and the steps that would be 100 % MFU and HFU."""
    step, again = result.model_flop, result.hardware_flop
    batch = result.instance.batch
    units = [(batch.samples, "sample")]
    if batch.samples is not None and batch.tokens_per_sample is not None:
        units.append((batch.samples * batch.tokens_per_sample, "token"))
    each = "".join(f", {flop_text(step / count)} a {unit}" for count, unit in units if count)
    peak = result.peak_flop_per_s
    return (
        f"Work      {flop_text(step)} a step{each}; MFU = {time_text(step / peak, 4)} / step "
        f"(HFU, all recomputed: {time_text(again / peak, 4)})"
    )


def memory_line(result: Estimate) -> str:
    """The least that the layers need on all GPUs together, and the GPUs for that."""
    least = result.least_devices
    text = (
        f"Memory    at least {size_text(result.least_memory_bytes)} with one microbatch in flight: "
        f"{plural(least, 'GPU')} or more"
    )
    return text + (f"; the model does not fit on {result.devices:,}" if least > result.devices else "")


def _parameters_text(result: Estimate) -> str:
    further = result.architecture.predictor_parameters
    text = f"{result.architecture.parameters:,} parameters"
    text += f" and {further:,} that only training has" if further else ""
    trained = result.architecture.trained_parameters
    return f"{text}, {trained:,} of them trained" if _adapted(result) else text


def _adapted(result: Estimate) -> bool:
    """Whether adapters are trained and not the model itself."""
    architecture = result.architecture
    return architecture.trained_parameters < architecture.parameters


def _state_text(result: Estimate) -> str:
    training = result.setting.training
    of_trained = training.gradient_bytes + training.optimizer_bytes
    if _adapted(result):
        return f"{training.weight_bytes:g} bytes a parameter and {of_trained:g} more a trained one"
    return f"{training.weight_bytes + of_trained:g} bytes a parameter"


def _options_text(result: Estimate) -> str:
    modes = [mode for of_kind in result.modes.values() for mode in of_kind]
    shards = max(mode.optimizer_shards for mode in modes)
    text = (
        f"; zero{shards}: optimizer state over {shards} replicas, in stages of as many replicas or more"
        if shards > 1
        else ""
    )
    return text + ("; offload: activations in host memory" if any(mode.offload for mode in modes) else "")


def _links_line(result: Estimate) -> str:
    """Each link's rate, and what the planner has for it: B counts what comes in and what goes out."""
    links = list(zip(result.instance.cluster.links, _link_texts(result), strict=True))
    *inner, (outermost, network) = links
    words = [f"{network} each way, so B = {_both_ways(outermost)}"]
    words += [f"{text}, so {_both_ways(link)}" for link, text in reversed(inner)]
    return "; ".join(words)


def _link_texts(result: Estimate) -> list[str]:
    """Of each link of the cluster, innermost first: what it is and its rate in one direction."""
    gpu = result.setting.gpu
    return [
        f"network between nodes, {_one_way(link)} a GPU"
        if link.devices is None
        else f"{gpu.link} within {link.devices}, {_one_way(link)}"
        for link in result.instance.cluster.links
    ]


def _one_way(link: Link) -> str:
    return f"{given_size_text(link.bandwidth_bytes_per_s / 2.0)}/s"


def _both_ways(link: Link) -> str:
    return f"{given_size_text(link.bandwidth_bytes_per_s)}/s"
