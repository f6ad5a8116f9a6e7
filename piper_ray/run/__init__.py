"""Plans trained for real: a user's model cut by a plan, run by torch's pipelines, and measured against the promise.

``job`` is what the ranks are to do and what was measured, ``launch`` starts them on this machine, ``run`` is the way
in, ``trace`` the same as events: none of them imports torch. A rank's process (``rank``) cuts the model (``stages``),
gives torch its list of actions (``lists``) and times its passes (``pipeline``), trains on microbatches of
``data``, and finds its peak of memory.
"""
