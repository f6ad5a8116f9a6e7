"""The forms in which a workload can be written."""

from __future__ import annotations

from enum import Enum


class Form(str, Enum):
    """PIPER, TOML hold every workload; PIPEDREAM (graph.txt) and DNN_PARTITIONING (JSON) only what those know.

    >>> Form("toml").value
    'toml'
    """

    PIPER = "piper"
    TOML = "toml"
    PIPEDREAM = "pipedream"
    DNN_PARTITIONING = "dnn-partitioning"


FORM_OF_SUFFIX = {".json": Form.PIPER, ".toml": Form.TOML, ".txt": Form.PIPEDREAM}
