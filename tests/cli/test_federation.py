"""What ``covey node``, ``covey link`` and ``covey federate`` say to mistakes, before Flower is started."""

from __future__ import annotations

import re

import pytest

from .shell import inside, run

NODE = ("node", "a.csv", "--home", "home", "--link", "localhost:8000")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("federation")
    (place / "a.csv").write_text("x\n1\n")
    (place / "a.crt").write_text("a certificate")
    for name, mode in (("a.key", 0o600), ("open.key", 0o644)):
        (place / name).write_text("a key")
        (place / name).chmod(mode)
    (place / "a.key.pub").write_text("ecdsa-sha2-nistp384 AAAA north")
    return place


@pytest.fixture
def starts_nothing(monkeypatch):
    """Without a mistake the command would become Flower's, and this process with it."""

    def become(*_):
        raise AssertionError("Flower would have been started")

    pytest.importorskip("flwr")
    monkeypatch.setattr("covey.federation.flower.launch._become", become)


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (("node", "b.csv", *NODE[2:], "--insecure", "--site", "a"), ["table 'b.csv'", "check the path"]),
        ((*NODE, "--insecure"), ["give it a name with --site"]),
        (NODE, ["--key and --ca", "--insecure"]),
        ((*NODE, "--key", "b.key", "--ca", "a.crt"), ["key 'b.key'", "check the path"]),
        ((*NODE, "--key", "a.key", "--ca", "b.crt"), ["certificate 'b.crt'", "check the path"]),
        ((*NODE, "--key", "open.key", "--ca", "a.crt"), ["key 'open.key'", "chmod 600"]),
        ((*NODE, "--key", "a.key.pub", "--ca", "a.crt"), ["key 'a.key.pub'", "public half", "give the private half"]),
        ((*NODE, "--insecure", "--site", "a", "--minimum", "0"), ["--minimum", ">= 1", "Got 0"]),
        ((*NODE[:-1], "localhost", "--insecure", "--site", "a"), ["--link", "host and port", "'localhost'"]),
        (("link",), ["--cert and --key", "--insecure"]),
        (("link", "--cert", "b.crt", "--key", "a.key"), ["certificate 'b.crt'", "check the path"]),
        (("link", "--cert", "a.crt", "--key", "open.key"), ["key 'open.key'", "chmod 600"]),
    ],
)
def test_mistakes_are_one_sentence(folder, words, facts, starts_nothing):
    done = inside(*words, cwd=folder, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"covey: [^\n]+\n", done.stderr)
    assert all(fact in done.stderr for fact in facts), done.stderr
    assert not (folder / "home").exists()


def test_a_link_that_is_not_there(folder, monkeypatch):
    pytest.importorskip("flwr")
    monkeypatch.setenv("FLWR_HOME", str(folder))
    (folder / "config.toml").write_text('[superlink.dead]\naddress = "127.0.0.1:9"\ninsecure = true\n')
    done = run("federate", "y ~ x", "--client", "c", "--link", "other", cwd=folder, check=False)
    assert done.returncode == 2
    config = folder / "config.toml"
    assert all(fact in done.stderr for fact in ("'other'", str(config), "[superlink.other]", "root-certificates")), done.stderr
    done = run("federate", "y ~ x", "--client", "c", "--link", "dead", cwd=folder, check=False)
    assert all(fact in done.stderr for fact in ("'dead'", "does not answer", "certificate", str(config))), done.stderr
