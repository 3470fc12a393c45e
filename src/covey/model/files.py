"""Save and load models: a folder with ``model.json``, ``clusters.parquet`` and ``clients.parquet``.

If penalties were learned from the likelihood, the folder may also have ``sums.parquet``, the sums of each client. If there are
sparse columns, ``shared.parquet`` has their coefficients. Numbers go through Parquet and JSON without loss, so a loaded model
predicts the same bits. ``model.json`` has the version of the format and checksums of the tables and of itself, so that a
damaged folder, or files of two models, are detected. Loading executes no code.

A new field of a model goes into ``_document`` and ``_rebuild``, or into ``_tables`` if there is one value for each client or
cluster. ``_rebuild`` must also read older folders, which lack the field. ``FORMAT`` rises only if earlier versions of covey
would misread the new folder; they refuse a higher format.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from covey._typing import Floats
from covey._version import __version__
from covey.errors import CoveyError, ModelError
from covey.losses import FAMILIES
from covey.model.batches import Batches
from covey.model.model import Elsewhere, Fitted, Model, assemble
from covey.objective.objective import Penalty
from covey.problem.problem import Classes, Spec, resolve
from covey.solvers.direct.elimination import Quadratic
from covey.solvers.result import Convergence, Fit, SharedCoefficients
from covey.tables.scaling import design_from_json
from covey.tables.values import Dropped
from covey.tree.hierarchy import Hierarchy
from covey.variance.components import Components, Learned, Whole
from covey.variance.uncertainty import Draws, Satterthwaite

FORMAT = 3
_SPARSE_FORMAT = 4  # of models with sparse columns, which earlier versions cannot read
_TABLES = ("clusters", "clients")
_SUMS, _SHARED = "sums", "shared"


def save_model(model: Model, path: str | Path, *, sums: bool = True, extra: Mapping[str, Any] | None = None) -> Path:
    """Write a model folder. An older model at the same place is replaced; it is an error if another folder is there.

    Parameters
    ----------
    sums : also write each client's ``X'X`` and ``X'y``, if the model has them, which intervals and updates need
    extra : more values to save, under the key "extra" of ``model.json``

    Returns
    -------
    The path of the folder.
    """
    path = check_target(path)
    if model.learned is not None and not sums:  # without sums it cannot be computed from the folder
        model = replace(model, learned=replace(model.learned, satterthwaite=model.posterior.satterthwaite))
    document = _document(model, dict(extra or {}))
    tables = dict(zip(_TABLES, _tables(model), strict=True))
    if sums and model.learned is not None and model.learned.has_sums:
        tables[_SUMS] = _sums_table(model.learned)
        if model.batches is not None:
            tables[_SUMS] = tables[_SUMS].with_columns(model.batches.to_column(model.hierarchy.n_clients))
    if model.shared is not None:
        columns = {"term": model.shared.terms, "estimate": model.shared.beta, "std_error": model.shared.errors}
        tables[_SHARED] = pl.DataFrame(columns)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as scratch:
            # The folder is written aside and then moved, so that a failed write leaves the old model as it was.
            fresh = Path(scratch) / "model"
            fresh.mkdir()
            for name, table in tables.items():
                table.write_parquet(fresh / f"{name}.parquet")
                document["sha256"][name] = _checksum(fresh / f"{name}.parquet")
            document["checksum"] = _document_checksum(document)
            (fresh / "model.json").write_text(json.dumps(document, indent=2, allow_nan=False) + "\n")
            _exchange(fresh, path)
    except (OSError, pl.exceptions.PolarsError) as problem:
        reason = getattr(problem, "strerror", None) or "the disk may be full"
        why = f"The model cannot be written to {str(path)!r} ({reason})"
        raise ModelError(f"{why}; make room there, or choose another folder.") from None
    return path


def _exchange(fresh: Path, path: Path) -> None:
    if not path.exists():
        fresh.rename(path)
        return
    old = path.with_name(f".{path.name}-old")
    path.rename(old)
    try:
        fresh.rename(path)
    except BaseException:
        old.rename(path)
        raise
    shutil.rmtree(old)


def check_target(path: str | Path) -> Path:
    """Raise an error if a model cannot be written to this path. Called before a long fit, not after it."""
    path = Path(path)
    near = next((parent for parent in path.absolute().parents if parent.exists()), path.absolute())
    if not near.is_dir() or not os.access(near, os.W_OK):
        raise ModelError(f"{str(path)!r} cannot be written: {str(near)!r} is not a folder with write permission.")
    if path.is_file() or (path.is_dir() and any(path.iterdir()) and not is_model(path)):
        raise ModelError(f"{str(path)!r} exists and is not a covey model, so it is not overwritten; choose another folder.")
    return path


def is_model(path: Path) -> bool:
    """Whether a folder holds a model and nothing else."""
    if path.is_symlink() or not path.is_dir():
        return False
    if not {file.name for file in path.iterdir()} <= {
        "model.json",
        *(f"{name}.parquet" for name in (*_TABLES, _SUMS, _SHARED)),
    }:
        return False
    try:
        document = json.loads((path / "model.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and isinstance(document.get("format"), int) and "sha256" in document


def load_model(path: str | Path) -> tuple[Model, dict[str, Any]]:
    """Read a model folder. Returns the model and the values that were saved as ``extra``."""
    path = Path(path)
    document = _read_document(path)
    try:
        # Models of earlier versions have no checksum of model.json.
        if document.get("checksum") not in (None, _document_checksum(document)):
            raise ModelError(f"The model in {str(path)!r} is damaged: model.json does not have its checksum; copy it again.")
        return _rebuild(document, {name: _read_table(path, name, document) for name in document["sha256"]})
    except CoveyError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, pl.exceptions.PolarsError) as problem:
        raise ModelError(
            f"The model in {str(path)!r} is damaged ({type(problem).__name__}: {problem}); fit or copy it again."
        ) from None


def _damaged(what: str, fix: str = "fit it again") -> ModelError:
    return ModelError(f"The model is damaged: {what}; {fix}.")


def _document(model: Model, extra: dict[str, Any]) -> dict[str, Any]:
    classes, elsewhere = model.problem.classes, model.elsewhere
    return {
        "format": FORMAT if model.shared is None else _SPARSE_FORMAT,
        "covey": __version__,
        "spec": model.spec.to_json(),
        "design": model.design.to_json(),
        "classes": None if classes is None else classes.to_json(),
        "has_offset": model.problem.has_offset,
        "global": dict(zip(model.terms, model.wbar.tolist(), strict=True)),
        # JSON has no NaN. A private fit does not compute the objective, so it is null.
        "convergence": {
            name: None if isinstance(value, float) and math.isnan(value) else value
            for name, value in asdict(model.convergence).items()
        },
        "learned": None if model.learned is None else learned_to_json(model.learned),
        "elsewhere": None
        if elsewhere is None
        else {name: np.asarray(getattr(elsewhere, name)).tolist() for name in ("sites", "clients", "rows")},
        "dropped": None if model.dropped is None else asdict(model.dropped),
        "extra": extra,
        "sha256": {},
    }


def _elsewhere(plain: Mapping[str, Any] | None, clusters: int) -> Elsewhere | None:
    if plain is None:
        return None
    clients, rows = (np.array(plain[name], dtype=np.int64) for name in ("clients", "rows"))
    if not clients.shape == rows.shape == (clusters,):
        raise _damaged("its numbers of clients at other sites do not match its clusters")
    return Elsewhere(tuple(plain["sites"]), clients, rows)


def learned_to_json(learned: Learned) -> dict[str, Any]:
    """The estimates as JSON, without the clients' sums."""
    rest = {name: getattr(learned, name) for name in ("whole", "satterthwaite", "draws")}
    return {
        "components": learned.components.to_json(),
        "covariance": learned.covariance.tolist(),
        "origin": learned.origin.tolist(),
        "log_weights": learned.log_weights,
        "basis": None if learned.basis is None else learned.basis.tolist(),
        **{name: None if value is None else value.to_json() for name, value in rest.items()},
    }


def uncertainty_from_json(plain: Mapping[str, Any], clusters: int, d: int) -> dict[str, Any]:
    """The fields ``basis``, ``satterthwaite`` and ``draws`` of the estimates. Older files do not have them."""
    basis = None if plain.get("basis") is None else np.array(plain["basis"], dtype=np.float64)
    satterthwaite = Satterthwaite.from_json(plain.get("satterthwaite"))
    draws = Draws.from_json(plain.get("draws"))
    good = [
        basis is None or (basis.shape == (d, d) and bool(np.isfinite(basis).all())),
        satterthwaite is None or satterthwaite.matches(d),
        draws is None or draws.matches(clusters, d),
    ]
    if not all(good):
        raise _damaged("the uncertainty of its variance components does not match its clusters and terms")
    return {"basis": basis, "satterthwaite": satterthwaite, "draws": draws}


def _sums_table(learned: Learned) -> pl.DataFrame:
    """One row per client: the lower triangle of ``C``, and ``r``, ``c``, ``n``."""
    units = learned.units
    rows, columns = np.tril_indices(units.C.shape[1])
    return pl.DataFrame({"C": units.C[:, rows, columns], "r": units.r, "c": units.c, "n": units.n})


def _learned(
    document: Mapping[str, Any] | None, sums: pl.DataFrame | None, terms: tuple[str, ...], tree: Hierarchy
) -> Learned | None:
    """The estimates, with the clients' sums if these were saved."""
    if document is None:
        return None
    d = len(terms)
    rows, columns = np.tril_indices(d)
    table = {"C": np.empty((0, len(rows))), "r": np.empty((0, d)), "c": np.empty(0), "n": np.empty(0)}
    if sums is not None and len(sums) != tree.n_clients:
        raise _damaged("sums.parquet does not have one row for each client", "copy the whole folder")
    if sums is not None:
        table = {name: np.ascontiguousarray(sums[name].to_numpy()) for name in table}
    C = np.zeros((len(table["n"]), d, d))
    C[:, rows, columns] = C[:, columns, rows] = table["C"]
    units = Quadratic(C, table["r"], table["c"], table["n"])
    components = Components.from_json(document["components"])
    covariance, origin = (np.array(document[name], dtype=np.float64) for name in ("covariance", "origin"))
    whole = None if document.get("whole") is None else Whole.from_json(document["whole"])
    numbers = [covariance, origin, components.client.covariance, components.cluster.covariance, *table.values()]
    shapes = [covariance.shape == (d, d), origin.shape == (d,), table["r"].shape[1] == d]
    if whole is not None:
        shapes.append(whole.matches(tree.n_clusters, d))
    s2 = components.residual
    if not all(shapes) or not all(np.isfinite(values).all() for values in numbers) or not (s2 is None or 0 < s2 < np.inf):
        raise _damaged("its variance components do not match its clients, clusters and terms")
    more = uncertainty_from_json(document, tree.n_clusters, d)
    return Learned(components, terms, tree, covariance, units, origin, float(document["log_weights"]), whole, **more)


def _tables(model: Model) -> tuple[pl.DataFrame, pl.DataFrame]:
    tree = model.hierarchy
    clusters = pl.DataFrame({"cluster": tree.cluster_ids, "clients": tree.sizes})
    clients = pl.DataFrame({"cluster": tree.parent, "client": tree.client_ids, "rows": model.rows})
    if model.penalty is not None:
        clusters = clusters.with_columns(lam=pl.Series(model.penalty.lam), gamma=pl.Series(model.penalty.cluster_gamma))
        clients = clients.with_columns(gamma=pl.Series(model.penalty.gamma))
    return _with_coefficients(clusters, model, model.w), _with_coefficients(clients, model, model.theta)


def _with_coefficients(table: pl.DataFrame, model: Model, values: Floats) -> pl.DataFrame:
    return table.with_columns(pl.Series(f"coef.{term}", values[:, at]) for at, term in enumerate(model.terms))


def _rebuild(document: Mapping[str, Any], tables: Mapping[str, pl.DataFrame]) -> tuple[Model, dict[str, Any]]:
    family = document["spec"].get("family")
    if isinstance(family, str) and family not in FAMILIES:
        raise ModelError(
            f"The model has the loss {family!r}, which is not registered, and functions are not saved with a model; call "
            f"covey.losses.from_functions({family!r}, ...) before loading the model, or upgrade covey."
        )
    draft = resolve(Spec.from_json(document["spec"]))
    design = design_from_json(document["design"], None if draft.formula is None else draft.formula.common)
    classes = None if document["classes"] is None else Classes.from_json(document["classes"])
    problem = draft.of_design(design, classes, bool(document["has_offset"]))
    if problem.learning:
        raise _damaged("what its formula learned from the training rows is missing")
    clusters, clients = tables["clusters"], tables["clients"]
    cluster_ptr = np.concatenate([[0], np.cumsum(clusters["clients"].to_numpy())]).astype(np.int64)
    ids, cluster_ids = clients["client"].rename(""), clusters["cluster"].rename("")
    if document["format"] < 3 and document["spec"].get("nested"):
        ids = _own_ids(ids, cluster_ids.gather(clients["cluster"]))
    tree = Hierarchy(cluster_ptr, ids, cluster_ids, bool(problem.spec.nested))
    if not np.array_equal(clients["cluster"].to_numpy(), tree.parent):
        raise _damaged("its clients do not match its clusters")
    penalty = None
    if "gamma" in clients.columns:
        gamma = clients["gamma"].to_numpy()
        # Models of earlier versions do not have the sums of gamma by cluster.
        total = clusters["gamma"].to_numpy() if "gamma" in clusters.columns else tree.sum_up(gamma)
        penalty = Penalty(gamma, clusters["lam"].to_numpy(), total)
    wbar = [document["global"][term] for term in design.terms]
    if not all(isinstance(value, float) for value in wbar):
        raise _damaged("its global coefficients are not numbers")
    theta, w = (
        np.ascontiguousarray(table.select([f"coef.{term}" for term in design.terms]).to_numpy(), dtype=np.float64)
        for table in (clients, clusters)
    )
    plain = document["convergence"]
    missing = {name: math.nan for name in ("objective", "gradient_norm") if plain[name] is None}
    shared = _shared(tables.get(_SHARED))
    fit = Fit(theta, w, np.array(wbar), Convergence(**{**plain, **missing}), shared=shared)
    learned = _learned(document.get("learned"), tables.get(_SUMS), design.terms, tree)
    if learned is not None and shared is not None:
        learned = replace(learned, more=int(np.isfinite(shared.errors).sum()))
    rows = clients["rows"].to_numpy().astype(np.int64)
    elsewhere = _elsewhere(document.get("elsewhere"), tree.n_clusters)
    dropped = None if document.get("dropped") is None else Dropped(**document["dropped"])
    fitted, batches = Fitted(fit, penalty, learned), Batches.from_table(tables.get(_SUMS))
    model = assemble(problem, fitted, tree, rows, elsewhere=elsewhere, dropped=dropped, batches=batches)
    return model, dict(document["extra"])


def _shared(table: pl.DataFrame | None) -> SharedCoefficients | None:
    """The coefficients of sparse columns."""
    if table is None:
        return None
    beta, errors = (np.ascontiguousarray(table[name].to_numpy(), dtype=np.float64) for name in ("estimate", "std_error"))
    if not np.isfinite(beta).all():
        raise _damaged("its coefficients of sparse columns are not numbers")
    return SharedCoefficients(tuple(table["term"].to_list()), beta, errors)


def _own_ids(labels: pl.Series, clusters: pl.Series) -> pl.Series:
    """The ids of nested clients from labels ``client:cluster``, which formats 1 and 2 have in their place."""
    ends = clusters.cast(pl.String).str.len_chars() + 1
    own = pl.select(labels.str.slice(0, labels.str.len_chars().cast(pl.Int64) - ends.cast(pl.Int64))).to_series().rename("")
    whole = own.cast(pl.Int64, strict=False)
    return whole if whole.cast(pl.String).eq_missing(own).all() else own


def _read_document(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise ModelError(f"There is no model folder {str(path)!r}; check the path.")
    try:
        document = json.loads((path / "model.json").read_text())
    except OSError:
        inside = path / "operator"
        hint = f" The model of the fit across sites is in {str(inside)!r}." if (inside / "model.json").exists() else ""
        raise ModelError(f"{str(path)!r} is not a covey model: it has no readable model.json.{hint}") from None
    except ValueError:
        raise ModelError(f"The model in {str(path)!r} is damaged: model.json is not valid JSON; fit it again.") from None
    version = document.get("format") if isinstance(document, dict) else None
    if not isinstance(version, int):
        raise ModelError(f"{str(path)!r} is not a covey model: its model.json has no format version.")
    if version > _SPARSE_FORMAT:
        raise ModelError(
            f"The model in {str(path)!r} has format {version}, written by covey {document.get('covey')}; this is covey "
            f"{__version__}, which reads formats up to {_SPARSE_FORMAT}: upgrade covey."
        )
    return dict(document)


def _read_table(path: Path, name: str, document: Mapping[str, Any]) -> pl.DataFrame:
    file = path / f"{name}.parquet"
    if not file.exists():
        raise ModelError(f"The model in {str(path)!r} is damaged: {name}.parquet is missing; copy the whole folder.")
    if _checksum(file) != document["sha256"][name]:
        raise ModelError(f"The model in {str(path)!r} is damaged: {name}.parquet does not match model.json; fit it again.")
    return pl.read_parquet(file)


def _document_checksum(document: Mapping[str, Any]) -> str:
    """A checksum of the values of model.json; spaces do not count."""
    text = json.dumps({name: value for name, value in document.items() if name != "checksum"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _checksum(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
