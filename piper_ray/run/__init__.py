"""Trains by a plan: torch's pipelines run a user's model, cut by the plan, and the measured times are compared with the
plan's.

``job`` describes the work of ranks and the measurements, ``launch`` starts the ranks on this machine, ``run`` is the
entry point, ``trace`` writes a run as events: none of them imports torch. A rank's process (``rank``) cuts the model
(``stages``), gives torch its list of actions (``lists``), times its passes (``pipeline``), trains on microbatches of
``data``, and measures its peak of memory.
"""
