"""The same fit across sites that keep their data: a node at each, a coordinator, and a transport between them.

Reading order: ``letters`` (what travels, as bytes), ``transport`` (who carries it), ``site`` (the node), ``coordinator``.
``flower/`` is the only place that imports flwr.
"""
