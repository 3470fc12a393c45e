"""The same fit across sites that keep their rows: a node at each site, a coordinator, and a transport between them.

Reading order:

- ``wire``: the messages to a site, their encoding as bytes, and the transport;
- ``privacy``: masks for secure aggregation, noise for differential privacy, and the accounting of its epsilon;
- ``site``: a site's table, its policy, what it remembers of a run, and how it answers;
- ``operator``: the settings of a run, the agreement of the sites, the exchanges, and the run as a whole;
- ``simulate``: all sites on one machine;
- ``flower``: real sites on Flower; the only package that imports flwr.

Where to look:

- "What happens when a site restarts?" It goes on from ``site/state.py``, which holds what it keeps on disk.
- "Who decides that a site is lost?" ``operator/exchanges.py``.
- "On what must sites agree?" ``operator/agreement.py``; the coordinator asks them in ``operator/coordinator.py``.
- "What does a site send in a REML fit?" Messages of a fit are declared beside the mathematics: those of a linear likelihood in
  ``variance/linear_likelihood.py``, those of Newton's method in ``solvers/direct/newton_node.py``, and so on.
  ``docs/reference/messages.md`` lists all of them.
"""
