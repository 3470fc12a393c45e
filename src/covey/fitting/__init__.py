"""From a network and a problem to a model; penalties by cross-validation, baselines, plans."""
