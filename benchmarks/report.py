"""Run every benchmark and write the page ``docs/benchmarks/index.md``: machine, versions, seconds and ratios.

    make bench-report                                   # everything; about half an hour
    python benchmarks/report.py [--only NAME] [--limit SECONDS]

With ``--only`` the other sections of the page stay as they are: each benchmark keeps its last output beside the page, with its
date and the versions it ran with.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "benchmarks"
VERSIONS = ("covey", "numpy", "scipy", "numba", "scikit-learn", "polars")
TITLES = {
    "bench_components": "Mixed models: covey and eight other programs",
    "bench_shared": "Terms that do not vary: covey, lmer and glmmTMB",
    "bench_wide": "Wide clients and ten lines of numpy",
    "bench_sparse": "Categories as sparse columns",
    "bench_growth": "Growth in clients and in terms",
    "bench_newton": "29,490 logistic clients and one pooled scikit-learn fit",
    "bench_million": "A million clients: memory and growth",
    "bench_randomised": "The paper's randomised algorithms and a Python loop",
    "bench_federation": "Time and bytes of a message to sites",
    "bench_start": "From the start of Python to coefficients",
    "bench_donors": "A grid of penalties for 29,490 donors",
}
FIGURES = {  # drawn by the benchmark of this name; the text is for readers who cannot see the picture
    "bench_growth": "Seconds of a fit against clients and against terms: points measured, lines predicted"
}


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


def machine() -> dict[str, Any]:
    load = os.getloadavg()[0]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "processor": processor(),
        "system": f"{platform.system()}, Python {platform.python_version()}",
        "load": round(load, 1),
        "versions": {name: importlib.metadata.version(name) for name in VERSIONS},
    }


def run(name: str, arguments: list[str]) -> dict[str, Any]:
    """Output of a benchmark, with the machine it ran on."""
    print(f"{name} ...", flush=True)
    before = machine()
    command = [sys.executable, str(HERE / f"{name}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE)
    text = done.stdout.rstrip() if done.returncode == 0 else f"{done.stdout}\nfailed: {done.stderr.strip()[-300:]}"
    print(text, flush=True)
    return {"output": text, "ok": done.returncode == 0, **before}


def peers_table(results: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    """Seconds of every program for every case, and the reasons of those without."""
    lines = []
    for title, programs in results.items():
        ours = programs["covey"].get("seconds")
        lines += [f"**{title}**", "", "| program | seconds | times covey's | log-likelihood |", "|---|---:|---:|---:|"]
        for program, result in sorted(programs.items(), key=lambda item: item[1].get("seconds", 1e9)):
            label = f"{program} {result['version']}" if "version" in result else program
            if "seconds" in result:
                times = f"{result['seconds'] / ours:.2f}" if ours else ""
                row = f"| {label} | {result['seconds']:.3f} | {times} | {result['log_likelihood']:.2f} |"
            else:
                row = f"| {label} | | | {result['reason'].replace('|', '/')} |"
            lines.append(row)
        lines.append("")
    return lines


def page(kept: dict[str, dict[str, Any]]) -> str:
    lines = [
        "# Benchmarks",
        "",
        "`make bench-report` runs all benchmarks and writes this page. Each section shows what the script of that name in",
        "`benchmarks/` printed, and the machine and versions it ran with. Compare ratios, not seconds: both sides of a ratio",
        "ran in the same run with the same number of threads. Load is that of the machine just before the run. On two cores",
        "a load near 2 means that other work was running, and the seconds are too long.",
        "",
    ]
    for name, title in TITLES.items():
        if name not in kept:
            continue
        result = kept[name]
        versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
        lines += [
            f"## {title}",
            "",
            f"`python benchmarks/{name}.py` on {result['date']}: {result['processor']}; {result['system']};",
            f"load {result['load']}; {versions}.",
            "",
        ]
        if "peers" in result:
            lines += [
                "Every program gets the same data frame, the same model and two threads, and is timed from data frame to",
                "fitted model; the best of up to three runs counts. Linear models are fitted by REML, except that GPBoost has",
                "maximum likelihood only. Logistic models use Laplace's approximation. Of two log-likelihoods of the same",
                "kind, the larger is the better fit. covey runs with `tests=False`: no other program here tests whether the",
                "groups of a level differ, which takes two more fits.",
                "",
                *peers_table(result["peers"]),
            ]
        else:
            if name in FIGURES:
                lines += [f"![{FIGURES[name]}]({name}.svg)", ""]
            lines += ["```text", result["output"], "```", ""]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="benchmarks whose name has this text")
    parser.add_argument("--limit", default="300", help="seconds that another program may take for a case")
    given = parser.parse_args()
    PAGE.mkdir(parents=True, exist_ok=True)
    store = PAGE / "results.json"
    kept = json.loads(store.read_text()) if store.exists() else {}
    for name in TITLES:
        if given.only in name:
            peers = PAGE / "peers.json"
            extra = [str(PAGE / f"{name}.svg")] if name in FIGURES else []
            extra = ["--limit", given.limit, "--json", str(peers)] if name == "bench_components" else extra
            result = run(name, extra)
            if name == "bench_components" and result["ok"]:
                result["peers"] = json.loads(peers.read_text())
                peers.unlink()
            if result["ok"]:
                kept[name] = result
            store.write_text(json.dumps(kept, indent=1) + "\n")
    (PAGE / "index.md").write_text(page(kept))
    print(f"wrote {PAGE / 'index.md'}")


if __name__ == "__main__":
    main()
