"""Run the command line in tests: in a new process, or in this process, which is much faster."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from subprocess import CompletedProcess
from unittest.mock import patch

from covey.cli import main

COVEY = str(Path(sys.executable).with_name("covey"))
PLAIN = {"COLUMNS": "100", "NO_COLOR": "1"}


def run(*arguments, cwd, check=True) -> CompletedProcess:
    """Run a command in a new process, as a user does."""
    environment = {**os.environ, **PLAIN}
    command = [COVEY, *map(str, arguments)]
    return _checked(subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=environment, check=False), check)


def inside(*arguments, cwd, check=True) -> CompletedProcess:
    """Run a command in this process."""
    out, err, argv = StringIO(), StringIO(), ["covey", *map(str, arguments)]
    code: object = None
    with (
        chdir(cwd),
        patch.dict(os.environ, PLAIN),
        patch.object(sys, "argv", argv),
        patch.object(warnings, "showwarning", warnings.showwarning),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as stopped:
            code = stopped.code
    return _checked(CompletedProcess(argv, int(code or 0), out.getvalue(), err.getvalue()), check)


def _checked(done: CompletedProcess, check: bool) -> CompletedProcess:
    assert done.returncode == 0 or not check, done.stderr
    return done
