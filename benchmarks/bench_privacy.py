"""What differential privacy costs in accuracy: the table of docs/explanation/differential-privacy.md.

    python benchmarks/bench_privacy.py

Fits the radon survey with noise and prints the root mean square distance of the coefficients from those of the exact fit, over
30 draws of the noise, for one node and for three.
"""

from __future__ import annotations

import numpy as np

from covey import HierarchicalRegressor
from covey.datasets import load_radon
from covey.federation.operator.settings import RunSettings
from covey.federation.privacy.differential import privacy_of
from covey.federation.simulate import simulate_sites
from covey.problem.problem import Spec

DRAWS = 30
ASKED = {"formula": "log_radon ~ floor", "client": "fips", "cluster": "state", "gamma": 10.0, "lam": 100.0}


def distances(run, exact):
    """Of one run: squared distances of the states', the global and the counties' coefficients, averaged."""
    model = run.outcome.model
    nodes = [run.sites[name].node(run.outcome.run) for name in run.outcome.roster]
    place = {client: i for i, client in enumerate(exact.hierarchy.client_ids.to_list())}
    counties = [
        node.coefficients() - exact.theta[[place[client] for client in node.data.hierarchy.client_ids.to_list()]]
        for node in nodes
    ]
    return [float((apart**2).mean()) for apart in (model.w - exact.w, model.wbar - exact.wbar, np.concatenate(counties))]


def main() -> None:
    homes = load_radon()
    exact = HierarchicalRegressor(**ASKED).fit(homes).model_
    print(f"states differ by {exact.w.std(axis=0).round(2)}, counties by {exact.theta.std(axis=0).round(2)}")
    print("| epsilon | noise | one node: states | global | counties | three nodes: states | global | counties |")
    for epsilon in (1.0, 3.0, 10.0, 30.0):
        private, delta = privacy_of({"epsilon": epsilon}, "gaussian")
        settings = RunSettings(private=private, delta=delta)
        cells = [f"{epsilon:g}", f"{private.noise:.2f}"]
        for sites in (1, 3):
            runs = [simulate_sites(homes, Spec(**ASKED), sites, settings=settings, noise_seed=draw) for draw in range(DRAWS)]
            cells += [f"{value:.2f}" for value in np.sqrt(np.mean([distances(run, exact) for run in runs], axis=0))]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
