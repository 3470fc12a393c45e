"""What ``covey node``, ``covey link`` and ``covey federate`` say to mistakes, before Flower is started."""

from __future__ import annotations

import pytest

from .shell import run

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


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("node", "b.csv", *NODE[2:], "--insecure", "--site", "a"), "There is no table 'b.csv'; check the path."),
        ((*NODE, "--insecure"), "Without keys the operator cannot name this site; give it a name with --site."),
        (NODE, "A node needs --key and --ca; say --insecure for a link without TLS, on one machine only."),
        ((*NODE, "--key", "b.key", "--ca", "a.crt"), "There is no key 'b.key'; check the path."),
        ((*NODE, "--key", "a.key", "--ca", "b.crt"), "There is no certificate 'b.crt'; check the path."),
        (
            (*NODE, "--key", "open.key", "--ca", "a.crt"),
            "The key 'open.key' is open to other users of this machine; chmod 600 it.",
        ),
        (
            (*NODE, "--key", "a.key.pub", "--ca", "a.crt"),
            "The key 'a.key.pub' is the public half, the operator's; give the private one, without .pub.",
        ),
        ((*NODE, "--insecure", "--site", "a", "--minimum", "0"), "The --minimum must be at least 1 client. Got 0 instead."),
        (
            (*NODE[:-1], "localhost", "--insecure", "--site", "a"),
            "The --link must be the link's host and port, such as link.example.org:8000. Got 'localhost' instead.",
        ),
        (("link",), "A link needs --cert and --key for TLS; say --insecure to go without, on one machine only."),
        (("link", "--cert", "b.crt", "--key", "a.key"), "There is no certificate 'b.crt'; check the path."),
        (
            ("link", "--cert", "a.crt", "--key", "open.key"),
            "The key 'open.key' is open to other users of this machine; chmod 600 it.",
        ),
    ],
)
def test_mistakes_are_one_sentence(folder, words, sentence):
    pytest.importorskip("flwr")
    done = run(*words, cwd=folder, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"covey: {sentence}\n")
    assert not (folder / "home").exists()


def test_a_link_that_is_not_there(folder, monkeypatch):
    pytest.importorskip("flwr")
    monkeypatch.setenv("FLWR_HOME", str(folder))
    (folder / "config.toml").write_text('[superlink.dead]\naddress = "127.0.0.1:9"\ninsecure = true\n')
    done = run("federate", "y ~ x", "--client", "c", "--link", "other", cwd=folder, check=False)
    assert done.returncode == 2
    config = folder / "config.toml"
    assert (
        done.stderr
        == f"covey: There is no link 'other' in {config}; add [superlink.other] with its address and root-certificates.\n"
    )
    done = run("federate", "y ~ x", "--client", "c", "--link", "dead", cwd=folder, check=False)
    assert (
        done.stderr
        == f"covey: The link 'dead' does not answer; check that it runs, and its address and certificate in {config}.\n"
    )
