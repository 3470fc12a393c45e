"""The same fit across sites that keep their data: a node at each, a coordinator, and a transport between them.

Reading order: ``letters`` (what travels, as bytes), ``transport`` (who carries it); at a site ``table`` (what it makes of its
rows) and ``site`` (the node); at the operator's ``agreement`` (what sites have in common), ``replies`` and ``coordinator`` (one
exchange, and what may go wrong with it), ``operate`` (a whole run). ``flower/`` is the only place that imports flwr.
"""
