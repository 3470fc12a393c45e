"""From a network and a problem to a model; cross-validation, baselines and plans."""
