"""The same fit across sites that keep their data: a node at each, a coordinator, and a transport between them.

Reading order, which is the import order: ``wire`` (messages to sites, letters, who carries them), ``privacy`` (masks, noise and
its accounting), ``site`` (what a site allows, remembers and answers), ``operator`` (exchanges, the set-up, the coordinator, a
whole run and its report), ``simulate`` (all sites on this machine), ``flower`` (the only place that imports flwr).
"""
