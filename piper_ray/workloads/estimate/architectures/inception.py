"""Inception-v3 (Szegedy et al. 2016) without the auxiliary classifier: modules of branches that are concatenated."""

from __future__ import annotations

from piper_ray.workloads.estimate.architectures.convolution import LEGEND, Network
from piper_ray.workloads.estimate.architectures.vision import Labelled, images_text
from piper_ray.workloads.estimate.families import Count, Family, Microbatch, no_check, no_length
from piper_ray.workloads.estimate.operators import Architecture


class InceptionConfig(Labelled):
    """``inception_v3``, a form of our own: there is none of Hugging Face."""

    image_size: Count = 299
    num_channels: Count = 3


def build(config: InceptionConfig, microbatch: Microbatch, name: str) -> Architecture:
    """Stem, eleven modules, classifier."""
    network = Network(microbatch.samples)
    image = (config.image_size, config.image_size, config.num_channels)
    last = network.unit(None, 32, (3, 3), stride=2, same=False, image=image)
    last = network.unit(last, 32, (3, 3), same=False)
    last = network.unit(last, 64, (3, 3))
    last = network.pool(last, 3, stride=2, same=False)
    last = network.unit(last, 80, (1, 1))
    last = network.unit(last, 192, (3, 3), same=False)
    last = network.pool(last, 3, stride=2, same=False)
    for pooled in (32, 64, 64):
        last = _square(network, last, pooled)
    last = _to_17(network, last)
    for inner in (128, 160, 160, 192):
        last = _factored(network, last, inner)
    last = _to_8(network, last)
    for _ in range(2):
        last = _spread(network, last)
    network.classifier(last, config.classes)
    return Architecture(name, tuple(network.nodes), images_text(microbatch, config.image_size), LEGEND)


def _units(network: Network, source: int, *units: tuple[int, tuple[int, int]]) -> int:
    for channels, kernel in units:
        source = network.unit(source, channels, kernel)
    return source


def _square(network: Network, source: int, pooled: int) -> int:
    return network.concatenate(
        [
            _units(network, source, (64, (1, 1))),
            _units(network, source, (48, (1, 1)), (64, (5, 5))),
            _units(network, source, (64, (1, 1)), (96, (3, 3)), (96, (3, 3))),
            _units(network, network.pool(source, 3), (pooled, (1, 1))),
        ]
    )


def _to_17(network: Network, source: int) -> int:
    double = _units(network, source, (64, (1, 1)), (96, (3, 3)))
    return network.concatenate(
        [
            network.unit(source, 384, (3, 3), stride=2, same=False),
            network.unit(double, 96, (3, 3), stride=2, same=False),
            network.pool(source, 3, stride=2, same=False),
        ]
    )


def _factored(network: Network, source: int, inner: int) -> int:
    wide, high = (1, 7), (7, 1)
    return network.concatenate(
        [
            _units(network, source, (192, (1, 1))),
            _units(network, source, (inner, (1, 1)), (inner, wide), (192, high)),
            _units(network, source, (inner, (1, 1)), (inner, high), (inner, wide), (inner, high), (192, wide)),
            _units(network, network.pool(source, 3), (192, (1, 1))),
        ]
    )


def _to_8(network: Network, source: int) -> int:
    single = _units(network, source, (192, (1, 1)))
    factored = _units(network, source, (192, (1, 1)), (192, (1, 7)), (192, (7, 1)))
    return network.concatenate(
        [
            network.unit(single, 320, (3, 3), stride=2, same=False),
            network.unit(factored, 192, (3, 3), stride=2, same=False),
            network.pool(source, 3, stride=2, same=False),
        ]
    )


def _spread(network: Network, source: int) -> int:
    single = _units(network, source, (384, (1, 1)))
    double = _units(network, source, (448, (1, 1)), (384, (3, 3)))
    return network.concatenate(
        [
            _units(network, source, (320, (1, 1))),
            _units(network, single, (384, (1, 3))),
            _units(network, single, (384, (3, 1))),
            _units(network, double, (384, (1, 3))),
            _units(network, double, (384, (3, 1))),
            _units(network, network.pool(source, 3), (192, (1, 1))),
        ]
    )


FAMILIES = {"inception_v3": Family(InceptionConfig, build, no_check, no_length, samples=32, batch=8192)}
