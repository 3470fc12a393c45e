"""The same fit across sites that keep their rows: a node at each, a coordinator, and a transport between them.

Reading order: ``wire`` (letters, and the messages to a site itself), ``privacy`` (masks, noise and its accounting), ``site`` (a
site's table, its policy, how it answers), ``operator`` (what sites agree on, one exchange and what may go wrong with it, a
whole run), ``simulate`` (all sites on this machine), ``flower`` (the only importer of flwr).

What a site computes and sends during a fit is not declared here but beside the mathematics: the messages of a linear
likelihood are in ``variance/linear_likelihood.py``, those of Newton in ``solvers/direct/newton.py``, and so on.
``docs/reference/messages.md`` lists all of them.
"""
