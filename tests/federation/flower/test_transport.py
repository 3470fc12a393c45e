"""Messages over Flower with real processes, TLS and node keys; a stand-in answers them."""

from __future__ import annotations

import json
import os
import re
import signal
import time

import pytest

from .conftest import deployed
from .deployment import hear, until

SITES = "north,south"

pytestmark = pytest.mark.federation


def exchanges(deployment, *script, sites=SITES):
    code, out, err = deployment.run({"sites": sites, "script": [*script]})
    assert code == 0, err
    return [step["replies"] for step in json.loads(out)], [step["seconds"] for step in json.loads(out)]


def test_messages_go_and_come_back(two):
    """Each site gets its own message; an absent site is 'gone'; the text of an error stays at the site."""
    script = [{"north": "1", "south": "2", "west": "1"}, 60], [{"north": "break in", "south": "3"}, 60]
    (first, second), seconds = exchanges(two, *script)
    print(f"seconds per exchange with two nodes: {seconds}")
    assert first["north"].startswith("north: 1, by process")
    assert first["west"] == ["it is not connected; start covey node there"]
    assert first["south"].startswith("south: 2, by process")
    assert first["south"].split()[-1] == second["south"].split()[-1], "one process answers all messages"
    assert second["north"] == ["it failed with ValueError; see the log at the site"]
    assert second["south"].startswith("south: 3")
    assert "a secret value in" in two.log("north")
    assert "a secret value" not in two.log("link")


def test_a_mistake_is_one_sentence(two):
    code, out, err = two.run({"sites": SITES, "mistake": "The column 'z' is not there; name another."})
    assert (code, out) == (1, "")
    assert err.splitlines()[-1] == "covey.errors.FederationError: The column 'z' is not there; name another."
    assert "Exit Code" not in err
    code, _, err = two.run({"sites": "north,east", "script": []}, wait=1)
    assert code == 1
    assert "Not connected after 1 seconds: 'east'; start covey node there, or change --sites." in err


def replies(run):
    out, err = run.communicate(timeout=300)
    assert run.returncode == 0, err
    return [step["replies"] for step in json.loads(out)]


def is_asked(deployment, site, what="sleep"):
    """Whether this node is at work on a message that it had not got before."""
    before = deployment.log(site).count(f"asked: {what}")
    return lambda: deployment.log(site).count(f"asked: {what}") > before


def test_a_node_killed_in_an_exchange_is_gone_and_may_come_back(two):
    """The other's reply is kept; the link holds the place of a dead node until its heartbeat is overdue, then lets it in."""
    script = [{"north": "sleep 600", "south": "1"}, 150], [{"south": "sleep 15"}, 60], [{"north": "3", "south": "3"}, 60]
    asked = is_asked(two, "north")
    run = two.start_run({"sites": SITES, "script": [*script]})
    until(asked)
    two.kill("north")
    two.start_node("north")
    until(lambda: "still holds its last connection" in two.log("north"))
    first, _, third = replies(run)
    assert first["north"] == ["its node has stopped; start covey node there again"]
    assert first["south"].startswith("south: 1")
    assert third["north"].startswith("north: 3")


def test_a_slow_site_is_late_and_a_crash_is_noticed(two):
    """A late reply is not taken for that of the next message."""
    script = [{"north": "sleep 20", "south": "1"}, 8], [{"north": "2", "south": "2"}, 60], [{"north": "die", "south": "3"}, 150]
    late, after, crash = replies(two.start_run({"sites": SITES, "script": [*script]}))
    assert late["north"] == ["it did not answer within 8 seconds"]
    assert late["south"].startswith("south: 1")
    assert after["north"].startswith("north: 2")
    assert crash["north"] == ["its node has stopped; start covey node there again"]
    assert crash["south"].startswith("south: 3")
    two.start_node("north")


def test_a_killed_coordinator_ends_its_run_and_the_next_one_works(two):
    asked = is_asked(two, "north")
    run = two.start_run({"sites": SITES, "script": [[{"north": "sleep 5", "south": "1"}, 60]]}, wait=90)
    until(asked, 120)
    (pid,) = two.marked("flwr-serverapp")
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    run.communicate(timeout=200)
    print(f"seconds until the run of a killed coordinator ended: {time.monotonic() - began:.0f}")
    assert run.returncode == 2
    (again,), _ = exchanges(two, [{"north": "1", "south": "1"}, 60])
    assert again["north"].startswith("north: 1")
    assert again["south"].startswith("south: 1")


def test_unregistered_nodes_are_refused(tmp_path):
    """Neither a key that nobody registered, nor a node without TLS; and a site does not take another's name."""
    with deployed(tmp_path, changed="standin") as deployment:
        deployment.register("north", "south")
        deployment.command("ssh-keygen -q -t ecdsa -b 384 -N '' -f stranger.key")
        deployment.start_node("stranger")
        until(lambda: "the link does not know the key of this node" in deployment.log("stranger"))
        deployment.start_node("north")
        deployment.start("plain", f"covey node --home north --link {deployment.address} --insecure --site plain")
        deployment.start_node("south", name="north")
        (only,), _ = exchanges(deployment, [{"north": "1", "south": "1", "stranger": "1", "plain": "1"}, 60])
        assert deployment.processes["plain"].poll() is None, "it tries on, in vain"
    assert only["north"].startswith("north: 1")
    assert only["south"] == ["it is 'north' in its site.toml but is registered as 'south'; use one name"]
    assert only["stranger"] == only["plain"] == ["it is not connected; start covey node there"]


def test_a_node_whose_clock_is_ahead_ends_with_one_sentence(tmp_path):
    with deployed(tmp_path, changed="skewed") as deployment:
        deployment.register("north")
        deployment.start_node("north")
        assert deployment.processes["north"].wait(60) == 2
        said = deployment.log("north").splitlines()[-1]
        link = f"The link {deployment.address} does not accept the key of this node"
        ahead = re.fullmatch(rf"covey: {link}; set the clock, which differs from the link's by \+(\d+) seconds\.", said)
        assert ahead, said
        assert 50 < int(ahead[1]) < 70


def test_an_insecure_link_asks_nodes_for_their_names(tmp_path):
    with deployed(tmp_path, changed="standin", insecure=True) as deployment:
        deployment.start_node("north")
        deployment.start_node("south")
        (first,), _ = exchanges(deployment, [{"north": "1", "south": "2"}, 60])
        assert first["north"].startswith("north: 1")
        assert first["south"].startswith("south: 2")
        deployment.start_node("again", name="north")
        until(lambda: "connected to" in deployment.log("again"))
        code, _, err = deployment.run({"sites": 3, "script": []})
        assert code == 1
        assert "Two connected nodes have the same name: 'north'; stop or rename one of them." in err
        code, _, err = deployment.run({"sites": 3, "script": [], "insecure": False})
        assert "was registered without a name" in err


@pytest.mark.parametrize("isolated", [False, True])
def test_a_link_that_is_killed_and_started_again(tmp_path, isolated):
    """Sites stay registered and come back by themselves; a run goes on if its coordinator was started apart from the link."""
    link = "--isolated" * isolated
    with deployed(tmp_path, link, changed="standin") as deployment:
        if isolated:
            deployment.start(
                "superexec", f"flower-superexec --runtime-api-address {deployment.address} --root-certificates link.crt"
            )
        deployment.register("north")
        deployment.start_node("north")
        until(lambda: "connected to" in deployment.log("north"))
        asked = is_asked(deployment, "north")
        run = deployment.start_run({"sites": 1, "script": [[{"north": "sleep 10"}, 150], [{"north": "2"}, 60]]})
        until(asked)
        deployment.kill("link")
        _, err = run.communicate(timeout=100)
        assert run.returncode == 1
        assert "The link 'link' went away in the middle of run" in err
        deployment.start_link(link)
        ended = until(lambda: re.search(r"finished:\w+", deployment.command("flwr list link --format json")), 180, 3)
        assert ended[0] == ("finished:completed" if isolated else "finished:failed")
        (again,), _ = exchanges(deployment, [{"north": "1"}, 60], sites="north")
        assert again["north"].startswith("north: 1")


def test_an_interrupt_stops_the_run(two):
    run = two.start_run({"sites": SITES, "script": [[{"north": "sleep 5", "south": "1"}, 60]] * 5})
    hear(run, "message 1")
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=60)
    assert run.returncode != 0
    listed = json.loads(two.command("flwr list link --format json"))["runs"]
    assert listed[0]["status"] == "finished:stopped"


def test_four_nodes(tmp_path):
    sites = ["east", "north", "south", "west"]
    with deployed(tmp_path, changed="standin") as deployment:
        deployment.register(*sites)
        for site in sites:
            deployment.start_node(site)
        began = time.monotonic()
        script = [[dict.fromkeys(sites, str(k)), 60] for k in range(3)]
        answer, seconds = exchanges(deployment, *script, sites=",".join(sites))
        print(f"seconds from flwr run to its end: {time.monotonic() - began:.1f}; per exchange with four nodes: {seconds}")
        assert all(answer[k][site].startswith(f"{site}: {k}") for site in sites for k in range(3))
