"""Fit one model with one program and print the seconds as JSON: ``fit.py PROGRAM CASE.json ROWS.parquet``.

The call that is timed takes a data frame and gives a fitted model, as a user would write it. Imports and reading the file
are not timed. The response is ``y``. The case names the common terms and the groupings, the outermost first, each with the
terms that vary by it. A fit that takes less than 20 s runs three times, and the best time counts.
"""

from __future__ import annotations

import importlib.metadata
import json
import resource
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import polars as pl

warnings.filterwarnings("ignore")
resource.setrlimit(resource.RLIMIT_AS, (20 << 30, 20 << 30))  # a program that asks for more than 20 GB has lost


def common(case: dict[str, Any]) -> str:
    return f"y ~ {' + '.join(['1', *case['terms']])}"


def bars(case: dict[str, Any]) -> str:
    """lme4's formula, independent terms written out."""
    written = []
    for level in case["levels"]:
        if case["independent"]:
            written += [f"({'1' if term == '1' else '0 + ' + term} | {level['column']})" for term in level["terms"]]
        else:
            written.append(f"({' + '.join(level['terms'])} | {level['column']})")
    return " + ".join([common(case), *written])


def covey_bars(case: dict[str, Any]) -> str:
    bar = "||" if case["independent"] else "|"
    nested = "/".join(level["column"] for level in case["levels"])
    return f"{common(case)} + ({' + '.join(case['levels'][0]['terms'])} {bar} {nested})"


def covey(case: dict[str, Any], rows: pl.DataFrame) -> Callable[[], float]:
    from covey import HierarchicalClassifier, HierarchicalRegressor

    kind = HierarchicalRegressor if case["family"] == "gaussian" else HierarchicalClassifier
    # No other program tests whether a level varies, which takes two more fits.
    return lambda: kind(formula=covey_bars(case), tests=False).fit(rows).components_.log_likelihood


def glmm(case: dict[str, Any], rows: pl.DataFrame) -> Callable[[], float]:
    import glmm

    data = {name: rows[name].to_numpy() for name in rows.columns}
    return lambda: glmm.fit(data, bars(case), family=case["family"], satterthwaite=False).loglik


def mixedlm(case: dict[str, Any], rows: pl.DataFrame) -> Callable[[], float]:
    import mixedlm
    from mixedlm import families

    frame = rows.to_pandas()
    if case["family"] == "gaussian":
        return lambda: mixedlm.lmer(bars(case), frame).logLik().value
    return lambda: mixedlm.glmer(bars(case), frame, family=families.Binomial()).logLik().value


def lme_python(case: dict[str, Any], rows: pl.DataFrame) -> Callable[[], float]:
    import lme_python

    if case["family"] == "gaussian":
        return lambda: lme_python.lmer(bars(case), rows).log_likelihood
    return lambda: lme_python.glmer(bars(case), rows, "binomial").log_likelihood


def _one_level(case: dict[str, Any]) -> dict[str, Any]:
    if len(case["levels"]) > 1 or case["independent"] or case["family"] != "gaussian":
        raise NotImplementedError("one grouping with a full covariance, linear models only")
    return dict(case["levels"][0])


def mixedlm_rs(case: dict[str, Any], rows: pl.DataFrame) -> Callable[[], float]:
    import mixedlm_rs

    level, frame = _one_level(case), rows.to_pandas()
    written, varying = common(case), "~ " + " + ".join(level["terms"])
    return lambda: mixedlm_rs.mixedlm(written, frame, groups=frame[level["column"]], re_formula=varying).fit().llf


def statsmodels(case: dict[str, Any], rows: pl.DataFrame) -> Callable[[], float]:
    from statsmodels.formula.api import mixedlm

    level, frame = _one_level(case), rows.to_pandas()
    written, varying = common(case), "~ " + " + ".join(level["terms"])
    return lambda: mixedlm(written, frame, groups=frame[level["column"]], re_formula=varying).fit().llf


def gpboost(case: dict[str, Any], rows: pl.DataFrame) -> Callable[[], float]:
    """GPBoost has maximum likelihood only, and independent terms only."""
    import gpboost
    import numpy as np

    if not case["independent"] and any(len(level["terms"]) > 1 for level in case["levels"]):
        raise NotImplementedError("no correlation between the terms of a grouping")
    groups = np.column_stack([rows[level["column"]].cast(pl.String).to_numpy() for level in case["levels"]])
    slopes = [(place + 1, term) for place, level in enumerate(case["levels"]) for term in level["terms"] if term != "1"]
    X = np.column_stack([np.ones(len(rows)), *(rows[term].to_numpy() for term in case["terms"])])
    varying: dict[str, Any] = {}
    if slopes:
        varying["group_rand_coef_data"] = np.column_stack([rows[term].to_numpy() for _, term in slopes])
        varying["ind_effect_group_rand_coef"] = [place for place, _ in slopes]
    likelihood = "gaussian" if case["family"] == "gaussian" else "bernoulli_logit"

    def fit() -> float:
        model = gpboost.GPModel(group_data=groups, likelihood=likelihood, **varying)
        model.fit(y=rows["y"].to_numpy(), X=X)
        return -float(model.get_current_neg_log_likelihood())

    return fit


PROGRAMS = {
    "covey": covey,
    "GPBoost": gpboost,
    "glmm": glmm,
    "mixedlm": mixedlm,
    "lme-python": lme_python,
    "mixedlm-rs": mixedlm_rs,
    "statsmodels": statsmodels,
}


def main() -> None:
    program, path, table = sys.argv[1:4]
    with open(path) as file:
        case = json.load(file)
    fit = PROGRAMS[program](case, pl.read_parquet(table))
    spent = []
    while len(spent) < 3:
        start = time.perf_counter()
        value = fit()
        spent.append(time.perf_counter() - start)
        if spent[0] > 20:
            break
    version = importlib.metadata.version(program)
    print(json.dumps({"seconds": min(spent), "log_likelihood": value, "version": version}))


if __name__ == "__main__":
    main()
