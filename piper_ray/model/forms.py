"""Forms of files, and the memory of microbatches in flight where a file does not state it."""

from __future__ import annotations

from enum import Enum


class Form(str, Enum):
    """PIPER and TOML hold every workload; PIPEDREAM (graph.txt) and DNN_PARTITIONING (JSON) hold what those formats
    know.

    >>> Form("toml").value
    'toml'
    """

    PIPER = "piper"
    TOML = "toml"
    PIPEDREAM = "pipedream"
    DNN_PARTITIONING = "dnn-partitioning"


FORM_OF_SUFFIX = {".json": Form.PIPER, ".toml": Form.TOML, ".txt": Form.PIPEDREAM}


class InFlight(str, Enum):
    """How a PipeDream profile's memory grows with y, the microbatches in flight.

    TWO_VERSIONS: activations of each, and two versions of the weights: a = activation, b = 2w (PipeDream-2BW, Narayanan
    et al., ICML 2021). STASHING: activations and a version of the weights for each: a = activation + w, b = 0
    (PipeDream, SOSP 2019, as its planner counts memory).

    >>> InFlight("stashing").value
    'stashing'
    """

    TWO_VERSIONS = "two-versions"
    STASHING = "stashing"
