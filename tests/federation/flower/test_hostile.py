"""A hostile operator with real processes, TLS and node keys: nothing comes back, and the audit log shows the attempt."""

from __future__ import annotations

import json
import os
import signal

import polars as pl
import pytest

from covey.federation.site.audit import AuditLog

from .conftest import deployed
from .deployment import until

pytestmark = pytest.mark.federation

APP = """
[project]
name = "covey"
version = "0.1.0"
license = "BSD-3-Clause"
dependencies = []
[tool.flwr.app]
publisher = "covey"
[tool.flwr.app.components]
serverapp = "hostile:server"
clientapp = "hostile:client"
[tool.flwr.app.config]
"""
CODE = """
import json, pathlib, time
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

client = ClientApp()
server = ServerApp()

def stolen(message, context):
    pathlib.Path("{folder}/executed").write_text("the node ran the operator's code")
    rows = pathlib.Path(str(context.node_config.get("data", "{folder}/north.parquet"))).read_bytes()
    return Message(RecordDict({{"covey": ConfigRecord({{"message": rows}})}}), reply_to=message)

client.train("covey")(stolen)
client.train()(stolen)
client.query("covey")(stolen)

@server.main()
def main(grid, context):
    record = lambda **values: RecordDict({{"covey": ConfigRecord(values)}})
    asked = [
        ("train.covey", record(message=b"rows, please", site="north", operator="")),
        ("train.covey", record(message="text", site="north")),
        ("train.covey", record(message=b"x", site="south", operator="")),
        ("train.covey", record(message=b"x", site="north", operator="ecdsa-sha2-nistp384 AAAA", signature="00")),
        ("train.covey", RecordDict()),
        ("train", record(message=b"x", site="north")),
        ("evaluate", RecordDict()),
        ("query.covey", RecordDict()),
    ]
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.2)
    found = []
    for kind, content in asked:
        sent = Message(content, dst_node_id=nodes[0], message_type=kind, ttl=60)
        (reply,) = grid.send_and_receive([sent], timeout=60)
        whole = dict(reply.content.config_records.get("covey", {{}})) if reply.has_content() else {{}}
        plain = {{k: v.decode("latin1") if isinstance(v, bytes) else v for k, v in whole.items()}}
        found.append([kind, reply.has_error(), plain])
    pathlib.Path("{folder}/found.json").write_text(json.dumps(found))
"""


def test_a_hostile_app_gets_nothing(tmp_path, homes):
    """The app of the operator is never executed, its messages get errors or refusals, and the node goes on."""
    with deployed(tmp_path) as deployment:
        deployment.register("north")
        homes.filter(pl.col("state") == "MN").write_parquet(tmp_path / "north.parquet")
        deployment.start_node("north", minimum=50)
        app = tmp_path / "app"
        app.mkdir()
        (app / "pyproject.toml").write_text(APP)
        (app / "hostile.py").write_text(CODE.format(folder=tmp_path))
        deployment.command("flwr run app link --stream", patience=180)
        found = json.loads(until(lambda: (tmp_path / "found.json").exists() and (tmp_path / "found.json").read_text()))
        assert not (tmp_path / "executed").exists()
        said = [(kind, error, sorted(values)) for kind, error, values in found]
        assert said == [
            ("train.covey", False, ["message"]),
            ("train.covey", True, []),
            ("train.covey", False, ["refusal"]),
            ("train.covey", False, ["refusal"]),
            ("train.covey", True, []),
            ("train", True, []),
            ("evaluate", True, []),
            ("query.covey", False, ["about", "site"]),
        ]
        assert "not a message of covey" in deployment.log("north") or "site's own log" in found[0][2]["message"]
        county = homes.filter(pl.col("state") == "MN")["county"][0]
        assert county not in json.dumps(found)
        assert "get-fab" not in deployment.log("link")
        events = [line["event"] for line in deployment.audit("north")]
        assert events == [
            "start",
            "message",
            *["foreign message"],
            "wrong name",
            "wrong signature",
            *["foreign message"] * 3,
            "status",
        ]
        assert AuditLog(tmp_path / "north").verify()[0] == len(events)
        os.kill(deployment.processes["north"].pid, signal.SIGTERM)
        assert deployment.processes["north"].wait(timeout=10) == 0
        assert deployment.audit("north")[-1]["event"] == "stop"
