"""The same fit in Flower's own simulation, on Ray: messages over its Grid, a site for each of its virtual nodes."""

from __future__ import annotations

import json

import numpy as np
import pytest
from flwr.serverapp import ServerApp

from covey.datasets import load_radon
from covey.federation.flower.client import site_app
from covey.federation.flower.transport import FlowerTransport
from covey.federation.operator.operate import operate
from covey.federation.simulate import split_among_sites
from covey.model import files as persist
from covey.problem.problem import Spec
from tests.fits import fit_table

ASKED = {"formula": "log_radon ~ floor", "client": "county", "cluster": "state", "gamma": 10.0, "lam": 5.0}


@pytest.mark.federation
@pytest.mark.filterwarnings("ignore::covey.errors.ConvergenceWarning")  # a randomised run stops long before its end
@pytest.mark.parametrize("solver", ["sweep", "l2gd"])
def test_a_fit_on_ray_is_the_fit_in_memory(tmp_path, monkeypatch, solver):
    pytest.importorskip("ray", reason="needs covey[simulation]")
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "0")
    from flwr.simulation import run_simulation

    homes = load_radon()
    settings = {**ASKED, "solver": solver}
    if solver == "l2gd":
        settings |= {"max_iter": 40, "tol": 1e-300, "options": {"L": 1400.0, "mu": 1.0}}
    spec = Spec(**settings)
    for name, part in split_among_sites(homes, spec, 3).items():
        part.write_parquet(tmp_path / f"{name}.parquet")

    def by_number(context):
        name = f"site{int(context.node_config['partition-id']) + 1}"
        return {"site": name, "data": str(tmp_path / f"{name}.parquet"), "home": str(tmp_path / name)}

    app = ServerApp()

    @app.main()
    def main(grid, context):
        transport = FlowerTransport(grid, named=False)
        said = operate(transport, {**settings, "sites": 3, "wait": 120.0, "out": str(tmp_path / "fit")}, print)
        (tmp_path / "said.json").write_text(json.dumps(said))

    run_simulation(app, site_app(by_number), 3, backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}})
    assert "models of the clusters and the global model" in (tmp_path / "said.json").read_text()
    expected = fit_table(homes, spec)
    own, _ = persist.load_model(tmp_path / "fit")
    close = np.testing.assert_array_equal if solver == "l2gd" else lambda a, b: np.testing.assert_allclose(a, b, atol=1e-10)
    close(own.w, expected.w)
    close(own.wbar, expected.wbar)
    clients = dict(zip(expected.hierarchy.client_ids.to_list(), expected.theta, strict=True))
    seen = 0
    for k in (1, 2, 3):
        model, _ = persist.load_model(tmp_path / f"site{k}" / "model")
        for client, theta in zip(model.hierarchy.client_ids.to_list(), model.theta, strict=True):
            close(theta, clients[client])
            seen += 1
    assert seen == len(clients)
