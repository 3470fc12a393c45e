"""Deployments that are stopped with all their processes, however a test ends."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from importlib.util import find_spec

import pytest

from .deployment import Deployment

collect_ignore = ["standin", "replaying", "skewed", "slow"]  # for processes of a deployment, not for this one


def needs_programs(*programs):
    if find_spec("flwr") is None:
        pytest.skip("needs Flower: pip install '.[flower]'")
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}")


@contextmanager
def deployed(folder, link="", **options):
    needs_programs("openssl", "ssh-keygen")
    deployment = Deployment(folder, **options)
    try:
        deployment.start_link(link)
        yield deployment
    finally:
        deployment.stop()


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two sites whose core is a stand-in: for what the transport does."""
    with deployed(tmp_path_factory.mktemp("two"), changed="standin") as deployment:
        deployment.register("north", "south")
        deployment.start_node("north")
        deployment.start_node("south")
        yield deployment
