"""Sites that do not fit together are refused by name, before the first exchange of the fit."""

from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from covey.errors import CoveyError, DataError, FederationError
from covey.federation.operator.agreement import _levels, check_tags
from covey.federation.operator.settings import Members, RunSettings
from covey.federation.site.policy import Policy
from covey.federation.site.table import profile_of
from covey.federation.wire.codec import client_tags
from covey.federation.wire.messages import Profile
from covey.problem.problem import resolve
from covey.records import decode, encode
from tests.federation.sites import FaultyTransport, by_turns, fit, kind, sites_of, spec, split_by, table
from tests.fits import fit_table

FRAME = table(21)
NUMBER = pl.col("client").str.slice(1).cast(pl.Int64)
OWN_LOG = r"Site 's1': Its table cannot be used as it is; the site's own log"


def refused(parts, pattern, asked=None, settings=None, fault=None, **policy):
    """One sentence, and no message of the fit was sent."""
    sites = sites_of(parts, **policy)
    carrier = FaultyTransport(sites, fault)
    with pytest.raises(CoveyError, match=pattern) as error:
        fit(sites, asked or spec(), carrier, settings)
    assert not [message for _, message in carrier.messages if kind(decode(message)) in ("ask", "deliver")]
    sentence = str(error.value)
    assert len(sentence) < 320
    assert sentence.endswith((".", "?"))
    return sentence


def changed(**columns):
    parts = by_turns(FRAME, 3)
    parts["s1"] = parts["s1"].with_columns(**columns)
    return parts


def test_a_missing_column():
    parts = by_turns(FRAME, 3)
    parts["s1"] = parts["s1"].drop("x")
    refused(parts, r"Site 's1': There is no column 'x'")
    parts = by_turns(FRAME, 3)
    parts["s1"] = parts["s1"].rename({"y": "yy"})
    refused(parts, r"Site 's1': There is no column 'y'; did you mean 'yy'")


@pytest.mark.parametrize(
    ("columns", "pattern"),
    [
        ({"x": pl.col("z")}, r"At site 's1' the column 'x' holds categories, at the other sites numbers"),
        ({"z": pl.col("x")}, r"At site 's1' the column 'z' holds numbers, at the other sites categories"),
        (
            {"client": pl.col("client").str.slice(1).cast(pl.Int64)},
            r"At site 's1' the ids of clients are integers, at the other sites text",
        ),
        ({"cluster": pl.lit(3)}, r"At site 's1' the ids of clusters are integers, at the other sites text"),
        ({"x": pl.lit(None, dtype=pl.Float64)}, OWN_LOG),
        ({"y": pl.lit("word")}, r"At site 's1' the response is text, at the other sites numbers"),
        ({"client": pl.lit(None, dtype=pl.String)}, OWN_LOG),
    ],
)
def test_a_column_of_another_kind(columns, pattern):
    refused(changed(**columns), pattern)


def test_errors_about_rows_stay_at_the_site(tmp_path, capsys):
    """The operator does not learn clients and values; the site's own log has them. A simulation shows them."""
    parts = changed(x=pl.lit(None, dtype=pl.Float64))
    refused(parts, OWN_LOG, home=tmp_path)
    assert "Column 'x' is NaN in row 8 (client 'c3')" in (tmp_path / "s1" / "refusal.txt").read_text()
    assert "client 'c3'" in capsys.readouterr().err
    refused(parts, r"Site 's1': Column 'x' is NaN in row 8 .client 'c3'.", share_row_errors=True)


def test_the_path_of_a_missing_table_stays_at_the_site(tmp_path):
    gone = DataError("There is no file '/secure/patients.csv'; check the path.")
    assert "patients" not in Policy(1).public_sentence(gone, tmp_path)
    assert "patients" in (tmp_path / "refusal.txt").read_text()


def test_a_category_that_the_operator_does_not_list():
    terms = RunSettings(categories={"z": ["z0", "z1", "z2"]})
    fit(sites_of(by_turns(FRAME, 3)), spec(), settings=terms)
    odd = changed(z=pl.when(pl.int_range(pl.len()) == 0).then(pl.lit("other")).otherwise(pl.col("z")))
    refused(
        odd,
        r"At site 's1' column 'z' has the category 'other', which is not in the operator's list 'z0', 'z1', 'z2'",
        settings=terms,
    )


def test_a_site_with_no_rows():
    parts = by_turns(FRAME, 3)
    parts["s1"] = parts["s1"].clear()
    refused(parts, r"Site 's1': The table has no rows")


@pytest.mark.parametrize("secure", [False, True])
def test_a_client_at_two_sites(secure):
    parts = by_turns(FRAME, 3)
    parts["s2"] = pl.concat([parts["s2"], parts["s0"].filter(pl.col("client") == "c0")])
    sentence = refused(parts, r"A client with the same id at sites 's0' and 's2'", settings=RunSettings(secure=secure))
    assert "c0" not in sentence


def test_another_version():
    def older(site, message, reply):
        read = decode(reply)
        if site == "s1" and kind(decode(message)) == "hello":
            return encode(replace(read, body=replace(read.body, version="0.0.9")))
        return reply

    refused(by_turns(FRAME, 3), r"Site 's1' has covey 0.0.9, the coordinator .*; install the same version", fault=older)


def test_a_site_itself_refuses_a_coordinator_of_another_version(monkeypatch):
    monkeypatch.setattr("covey.federation.operator.coordinator.__version__", "9.9")
    refused(by_turns(FRAME, 3), r"Site 's0': This site runs covey .*, the coordinator 9.9")


def test_sums_over_fewer_clients_than_the_minimum_are_refused():
    parts = by_turns(FRAME, 3)
    refused(
        parts,
        r"Site 's0': Column 'cluster' has a value that fewer than 5 clients here have",
        asked=spec(),
        minimum=5,
    )


def test_classes_are_agreed_and_there_are_two(tmp_path):
    frame = table(22, "bernoulli").with_columns(y=pl.col("y").replace_strict({0: "no", 1: "yes"}))
    parts = by_turns(frame, 3)
    parts["s1"] = parts["s1"].with_columns(y=pl.lit("yes"))
    outcome = fit(sites_of(parts), spec("bernoulli"))
    assert outcome.model.classes.tolist() == ["no", "yes"]
    parts["s2"] = parts["s2"].with_columns(y=pl.lit("perhaps"))
    refused(parts, r"responses of the sites have 3 classes, 'no', 'perhaps', 'yes'", asked=spec("bernoulli"))
    refused(
        {name: part.with_columns(y=pl.lit("no")) for name, part in parts.items()}, "one class only", asked=spec("bernoulli")
    )


def test_counts_that_are_zero_everywhere():
    refused(by_turns(FRAME.with_columns(y=pl.lit(0)), 3), "0 in every row of every site", asked=spec("poisson"))


def test_the_operators_list_of_clusters(tmp_path):
    frame = FRAME.with_columns(site=pl.col("cluster").replace_strict({"a": "s0", "b": "s1", "c": "s2"}))
    parts = {name: frame.filter(pl.col("site") == name) for name in ("s0", "s1", "s2")}
    frame.select("site", "cluster").unique().write_csv(tmp_path / "members.csv")
    members = Members.read(tmp_path / "members.csv")
    fit(sites_of(parts), spec(), settings=RunSettings(members=members))
    parts["s1"] = parts["s1"].with_columns(cluster=pl.lit("a"))
    refused(
        parts, r"Site 's1' has rows of cluster 'a', but the operator's list gives it 'b'", settings=RunSettings(members=members)
    )
    parts = {"s0": parts["s0"], "s9": parts["s2"]}
    refused(parts, r"'s9' is not in the operator's list", settings=RunSettings(members=replace(members, clients={})))


def test_a_site_that_claims_clients_of_another(tmp_path):
    parts = by_turns(FRAME, 3)
    rows = [part.select(pl.lit(name).alias("site"), "cluster", "client").unique() for name, part in parts.items()]
    rows += [pl.DataFrame({"site": "s1", "cluster": list("abc"), "client": None})]
    pl.concat(rows, how="vertical_relaxed").write_parquet(tmp_path / "members.parquet")
    members = Members.read(tmp_path / "members.parquet")
    fit(sites_of(parts), spec(), settings=RunSettings(members=members))
    mine = pl.col("client") == parts["s2"]["client"][0]
    stolen = {**parts, "s1": pl.concat([parts["s1"], parts["s2"].filter(~mine)]), "s2": parts["s2"].filter(mine)}
    refused(
        stolen,
        r"Site 's1' claims 3 of the clients that the operator's list gives to site 's2'",
        settings=RunSettings(members=members),
    )
    new = {**parts, "s1": parts["s1"].with_columns(client=pl.col("client") + "x")}
    refused(new, r"Site 's1' has 4 clients that are not in the operator's list", settings=RunSettings(members=members))
    moved = {**parts, "s1": parts["s1"].with_columns(cluster=pl.col("cluster").replace({"a": "b", "b": "a"}))}
    refused(
        moved,
        r"Site 's1' has \d clients that are not .* or are there in another cluster",
        settings=RunSettings(members=members),
    )


def test_tags_do_not_depend_on_order_and_need_their_key():
    one = client_tags(["a", "b", 3], "00" * 16)
    assert one.tolist() == client_tags([3, "b", "a"], "00" * 16).tolist()
    assert one.tolist() != client_tags(["a", "b", 3], "01" * 16).tolist()
    check_tags({"x": one, "y": client_tags(["c"], "00" * 16)})


def test_a_formula_is_needed():
    refused(by_turns(FRAME, 3), "names the response", asked=replace(spec(), formula=None))


def test_an_unreadable_formula_is_refused_at_the_operator():
    refused(by_turns(FRAME, 3), "The formula 'x \\+' cannot be read", asked=spec(formula="y ~ x +"))


def test_of_two_sites_of_different_kinds_both_are_named():
    parts = by_turns(FRAME, 2)
    parts["s1"] = parts["s1"].with_columns(x=pl.lit("text"))
    refused(parts, r"At site 's0' the column 'x' holds numbers, at site 's1' categories; convert one of them")


@pytest.mark.parametrize("one", [pl.Int64, pl.Float64, pl.Boolean])
@pytest.mark.parametrize("two", [pl.Int64, pl.Float64, pl.Boolean])
def test_classes_are_the_same_whatever_the_type_of_the_column_at_a_site(one, two):
    """One site has only zeros, perhaps of another type; the class 1 is still the modelled one."""
    frame = table(11, "bernoulli", clients=24)
    none = frame.group_by("client").agg(pl.col("y").sum()).sort("y", "client")["client"][:3].to_list()
    frame = frame.with_columns(y=pl.when(pl.col("client").is_in(none)).then(0).otherwise(pl.col("y")))
    parts = split_by(frame, {client: "s0" if client in none else "s1" for client in frame["client"].unique().to_list()})
    parts = {
        site: part.with_columns(pl.col("y").cast(kind)) for (site, part), kind in zip(parts.items(), (one, two), strict=True)
    }
    asked = spec("bernoulli")
    outcome = fit(sites_of(parts), asked)
    np.testing.assert_allclose(outcome.model.wbar, fit_table(frame, asked).wbar, atol=1e-9)


def test_a_response_of_another_kind():
    frame = table(11, "bernoulli")
    parts = by_turns(frame, 3)
    parts["s1"] = parts["s1"].with_columns(y=pl.when(pl.col("y") == 1).then(pl.lit("yes")).otherwise(pl.lit("no")))
    with pytest.raises(FederationError, match="At site 's1' the response is text, at the other sites numbers"):
        fit(sites_of(parts), spec("bernoulli"))


def test_a_class_that_few_clients_have_is_not_sent():
    frame = table(11, "bernoulli").with_columns(y=pl.when(pl.col("y") == 1).then(pl.lit("yes")).otherwise(pl.lit("no")))
    rare = frame.with_columns(y=pl.when(pl.col("client") == "c0").then(pl.col("y")).otherwise(pl.lit("no")))
    asked = resolve(spec("bernoulli"))
    assert profile_of(rare, asked, minimum=2).classes == ("no",)
    assert profile_of(rare, asked, minimum=1).classes == profile_of(frame, asked, minimum=2).classes == ("no", "yes")


@pytest.mark.parametrize("name", ["client", "cluster"])
def test_a_term_of_the_name_of_a_level(name):
    frame = FRAME.rename({"client": "who", "cluster": "where"}).with_columns(**{name: pl.col("z")})
    asked = spec(formula=f"y ~ x + {name}", client="who", cluster="where")
    owner = {who: f"s{at % 2}" for at, who in enumerate(frame["who"].unique(maintain_order=True).to_list())}
    where = frame["who"].replace_strict(owner)
    outcome = fit(sites_of({site: frame.filter(where == site) for site in ("s0", "s1")}), asked)
    np.testing.assert_allclose(outcome.model.w, fit_table(frame, asked).w, atol=1e-10)


def test_orders_of_categories_are_merged():
    """Categories of pandas have an order; the orders of the sites are merged, unless they contradict each other."""
    order = ["low", "mid", "high", "top"]
    profiles = {
        site: Profile("", {}, {}, {"z": tuple(levels)}, (), None)
        for site, levels in {"a": ["low", "mid", "high"], "b": ["mid", "high", "top"], "c": ["low", "top"]}.items()
    }
    assert _levels("z", profiles, {}) == order
    crossed = {**profiles, "d": replace(profiles["a"], levels={"z": ("high", "low")})}
    with pytest.raises(FederationError, match="'z' in different orders; give --categories"):
        _levels("z", crossed, {})
    assert _levels("z", crossed, {"z": order}) == order


def test_under_masks_a_category_that_one_site_has_alone():
    frame = FRAME.with_columns(z=pl.when(pl.col("client") == "c0").then(pl.lit("rare")).otherwise(pl.col("z")))
    parts = by_turns(frame, 3)
    fit(sites_of(parts), spec())
    with pytest.raises(
        FederationError, match=r"1 of 4 categories of 'z' are at one site only, such as 'rare' at 's0'.*masks hide nothing"
    ):
        fit(sites_of(parts), spec(), settings=RunSettings(secure=True))


def test_two_sites_are_named_with_the_clients_that_they_share():
    parts = by_turns(FRAME, 3)
    parts["s1"] = pl.concat([parts["s1"], parts["s0"].filter(pl.col("client").is_in(["c0", "c1"]))])
    parts["s2"] = pl.concat([parts["s2"], parts["s0"]])
    refused(parts, r"2 clients with the same id at sites 's0' and 's1'|4 clients with the same id at sites 's0' and 's2'")
