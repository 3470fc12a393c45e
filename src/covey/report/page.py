"""One self-contained HTML page: escaped text, tables that sort, figures for light and dark, and a search over groups.

The page needs no network. Its policy allows no script but its own, and all strings of a user reach it escaped, or as JSON that
the script inserts as text.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from covey.report.style import Draw, figure_of

_DPI = 100
_COLOURS = 128

_CSS = """
:root{--ink:#1c1c1c;--paper:#fff;--soft:#f3f5f7;--line:#c9ced6;--accent:#005a8d;--good:#0b6b3a;--fair:#8a5300;--bad:#a31515}
@media (prefers-color-scheme:dark){:root{--ink:#ececec;--paper:#16181c;--soft:#22262c;--line:#444b55;--accent:#7cc4f0;
--good:#6ed39a;--fair:#f0b35a;--bad:#ff8f8f}}
*{box-sizing:border-box}
body{margin:0;color:var(--ink);background:var(--paper);font:16px/1.55 system-ui,-apple-system,"Segoe UI",sans-serif}
header,main,footer{max-width:60rem;margin:0 auto;padding:0 1rem}
header{padding-top:1.5rem}
h1{font-size:1.7rem;line-height:1.25;margin:.2rem 0 .6rem}
h2{font-size:1.3rem;margin:2.4rem 0 .6rem;border-bottom:1px solid var(--line);padding-bottom:.2rem}
h3{font-size:1.05rem;margin:1.4rem 0 .4rem}
a{color:var(--accent)}
nav ol{columns:2;padding-left:1.2rem;margin:.4rem 0}
@media (max-width:36rem){nav ol{columns:1}}
.skip{position:absolute;left:-999rem}
.skip:focus{left:1rem;top:.5rem;background:var(--paper);padding:.4rem .7rem}
.answer{background:var(--soft);border-left:.3rem solid var(--accent);padding:.7rem 1rem;margin:1rem 0}
.answer p{margin:.35rem 0}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.92rem;margin:.6rem 0}
caption{text-align:left;font-weight:600;padding:.3rem 0}
th,td{padding:.3rem .55rem;border-bottom:1px solid var(--line);text-align:left;vertical-align:top}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
td.n{white-space:nowrap}
th button{font:inherit;font-weight:600;color:inherit;background:none;border:0;padding:0;cursor:pointer;text-align:inherit}
th button::after{content:"\\00a0\\2195";opacity:.45}
th[aria-sort=ascending] button::after{content:"\\00a0\\2191";opacity:1}
th[aria-sort=descending] button::after{content:"\\00a0\\2193";opacity:1}
:focus-visible{outline:3px solid var(--accent);outline-offset:2px}
figure{margin:1rem 0}
figure img{max-width:100%;height:auto;border:1px solid var(--line)}
figure .dark{display:none}
@media screen and (max-width:40rem){figure{overflow-x:auto}figure img{max-width:none;width:38rem}}
@media (prefers-color-scheme:dark){figure .light{display:none}figure .dark{display:inline}}
.verdict{font-weight:700}
.good{color:var(--good)}.fair{color:var(--fair)}.bad{color:var(--bad)}
.need{background:var(--soft);padding:.6rem 1rem;border:1px dashed var(--line)}
label{font-weight:600;display:block;margin:.6rem 0 .2rem}
input[type=search]{font:inherit;width:100%;max-width:30rem;padding:.5rem .6rem;color:var(--ink);background:var(--paper);
border:1px solid var(--ink);border-radius:.25rem}
#hits{list-style:none;padding:0;margin:.4rem 0;max-width:30rem}
#hits button{font:inherit;width:100%;text-align:left;padding:.35rem .6rem;color:var(--ink);background:var(--soft);
border:1px solid var(--line);cursor:pointer}
#story{background:var(--soft);padding:.1rem 1rem;margin:.8rem 0}
#story:empty{display:none}
pre{background:var(--soft);padding:.7rem 1rem;overflow-x:auto;font-size:.85rem;white-space:pre-wrap;overflow-wrap:anywhere}
footer{margin:3rem auto 2rem;font-size:.85rem}
@media print{:root{--ink:#000;--paper:#fff;--soft:#fff;--line:#999;--accent:#000;--good:#000;--fair:#000;--bad:#000}
body{font-size:10.5pt}nav,.search,.skip{display:none}figure,table,.answer{break-inside:avoid}h2,h3{break-after:avoid}
figure .light{display:inline!important}figure .dark{display:none!important}th button::after{content:""}a{text-decoration:none}}
"""

_JS = """
"use strict";
(function () {
  function value(cell) {
    var raw = cell.getAttribute("data-v");
    if (raw === null) { return cell.textContent.toLowerCase(); }
    return raw === "" ? -Infinity : parseFloat(raw);
  }
  document.querySelectorAll("table.sortable").forEach(function (table) {
    table.querySelectorAll("thead th").forEach(function (head, at) {
      var button = head.querySelector("button");
      if (!button) { return; }
      button.addEventListener("click", function () {
        var down = head.getAttribute("aria-sort") === "ascending", body = table.tBodies[0];
        var rows = Array.prototype.slice.call(body.rows);
        rows.sort(function (a, b) {
          var x = value(a.cells[at]), y = value(b.cells[at]), order = x < y ? -1 : x > y ? 1 : 0;
          return down ? -order : order;
        });
        table.querySelectorAll("thead th").forEach(function (other) { other.removeAttribute("aria-sort"); });
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        rows.forEach(function (row) { body.appendChild(row); });
      });
    });
  });
  var box = document.getElementById("find"), holder = document.getElementById("groups");
  if (!box || !holder) { return; }
  var all = JSON.parse(holder.textContent), hits = document.getElementById("hits");
  var story = document.getElementById("story"), count = document.getElementById("count");
  var names = all.rows.map(function (row) { return String(row[0]).toLowerCase(); });
  function text(tag, words) { var node = document.createElement(tag); node.textContent = words; return node; }
  function name(row, join, end) {
    var id = String(row[0]), upper = all.clusters[row[1]];
    return upper === null || (", " + id).endsWith(", " + upper) ? id : id + join + upper + end;
  }
  function show(n) { return n === null ? "-" : String(Number(n.toPrecision(4))); }
  function tell(row) {
    var w = all.words;
    story.textContent = "";
    story.appendChild(text("h3", name(row, " (" + w.cluster + " ", ")")));
    var lines = ["It has " + row[2].toLocaleString("en") + (row[2] === 1 ? " row." : " rows.")];
    if (row[3] !== null && row[5] !== null) {
      lines.push("The mean of its own rows is " + show(row[3]) + "; the " + w.above + " model predicts " + show(row[4]) +
        " for them; its own model predicts " + show(row[5]) + ".");
    }
    if (row[6] !== null) {
      var interval = row[7] === null ? "" : ", with a 95% interval from " + show(row[7]) + " to " + show(row[8]);
      lines.push("Its " + w.term + " is " + show(row[6]) + interval + ".");
    }
    if (row[9] !== null) {
      var own = Math.round(100 * row[9]);
      lines.push("Its own rows determine " + own + "% of that; the other " + (100 - own) + "% comes from the " + w.above +
        " model, because " + (own < 50 ? "it has few rows beside how much rows vary." : "its rows say enough by themselves."));
    }
    if (row[10] !== null && Math.abs(row[10]) >= 2) {
      lines.push("It is surprising: " + show(Math.abs(row[10])) + " standard deviations " + (row[10] > 0 ? "above" : "below") +
        " what the " + w.above + " model expects.");
    }
    lines.forEach(function (line) { story.appendChild(text("p", line)); });
    story.focus();
  }
  function find() {
    var asked = box.value.trim().toLowerCase(), found = [], total = 0;
    hits.textContent = "";
    if (asked === "") { count.textContent = ""; return; }
    for (var pass = 0; pass < 2; pass++) {
      for (var at = 0; at < names.length; at++) {
        var place = names[at].indexOf(asked);
        if (place < 0 || (place === 0) !== (pass === 0)) { continue; }
        total++;
        if (found.length < 8) { found.push(at); }
      }
    }
    count.textContent = total === 0 ? "No group has this in its name." : total.toLocaleString("en") +
      (total === 1 ? " group" : " groups") + (total > 8 ? ", the first 8 are shown" : "");
    found.forEach(function (at) {
      var item = document.createElement("li"), row = all.rows[at], button = text("button", name(row, ", ", ""));
      button.type = "button";
      button.addEventListener("click", function () { tell(row); });
      item.appendChild(button);
      hits.appendChild(item);
    });
    if (total === 1) { tell(all.rows[found[0]]); box.focus(); }
  }
  box.addEventListener("input", find);
})();
"""


class Page:
    """Sections of a page, in order. All text that is passed to it is escaped."""

    def __init__(self, title: str, about: str) -> None:
        self.title, self.about = title, about
        self.sections: list[tuple[str, str, list[str]]] = []
        self.body: list[str] = []
        self.groups: str | None = None

    def section(self, name: str, heading: str, *, before: str | None = None) -> None:
        """Begin a section at the end, or before another one; ``name`` is its anchor."""
        names = [each[0] for each in self.sections]
        self.body = []
        self.sections.insert(len(names) if before is None else names.index(before), (name, heading, self.body))

    def add(self, html: str) -> None:
        self.body.append(html)

    def paragraphs(self, *sentences: str) -> None:
        for each in sentences:
            self.add(f"<p>{escape(each)}</p>")

    def answer(self, *sentences: str) -> None:
        self.add('<div class="answer">' + "".join(f"<p>{escape(each)}</p>" for each in sentences) + "</div>")

    def need(self, sentence: str) -> None:
        """Say which data a part needs."""
        self.add(f'<p class="need">{escape(sentence)}</p>')

    def heading(self, text: str) -> None:
        self.add(f"<h3>{escape(text)}</h3>")

    def items(self, sentences: Iterable[str]) -> None:
        self.add("<ul>" + "".join(f"<li>{escape(each)}</li>" for each in sentences) + "</ul>")

    def verdict(self, what: str, verdict: str, why: str) -> None:
        """A line with a verdict: "good", "fair" or "bad", in words."""
        said = {"good": "no sign of a problem", "fair": "worth a look", "bad": "does not hold"}[verdict]
        self.add(f'<p>{escape(what)}: <span class="verdict {verdict}">{said}</span>. {escape(why)}</p>')

    def code(self, text: str) -> None:
        self.add(f'<pre tabindex="0">{escape(text)}</pre>')

    def table(self, caption: str, head: Sequence[str], rows: Iterable[Sequence[Any]], *, sortable: bool = True) -> None:
        """A table; numbers are aligned to the right and sort as numbers."""
        rows = list(rows)
        numeric = [
            bool(rows) and all(row[at] is None or isinstance(row[at], int | float) for row in rows) for at in range(len(head))
        ]
        cells = []
        for at, name in enumerate(head):
            label = f'<button type="button">{escape(name)}</button>' if sortable else escape(name)
            cells.append(f'<th scope="col"{_right(numeric[at])}>{label}</th>')
        body = ["<tr>" + "".join(_cell(value, numeric[at], head[at]) for at, value in enumerate(row)) + "</tr>" for row in rows]
        kind = ' class="sortable"' if sortable else ""
        self.add(
            f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table{kind}>'
            f"<caption>{escape(caption)}</caption><thead><tr>{''.join(cells)}</tr></thead>"
            f"<tbody>{''.join(body)}</tbody></table></div>"
        )

    def figure(self, draw: Draw, size: tuple[float, float] = (8.0, 5.0)) -> str:
        """A figure for light and for dark; its title is also its description. Returns the title."""
        images, title = [], ""
        for name in ("light", "dark"):
            figure = figure_of(draw, dark=name == "dark", size=size)
            title = " ".join(figure.axes[0].get_title("left").split())
            source = base64.b64encode(_png(figure)).decode()
            images.append(f'<img class="{name}" alt="{escape(title)}" src="data:image/png;base64,{source}">')
        self.add(f'<figure tabindex="0">{"".join(images)}</figure>')
        return title

    def search(self, about: Sequence[str], label: str, document: Any) -> None:
        """A search over groups at the head of the section; ``document`` has their rows."""
        self.groups = json.dumps(document, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
        self.body[:0] = [f'<p class="search">{escape(each)}</p>' for each in about]
        self.body.insert(
            len(about),
            f'<div class="search"><label for="find">{escape(label)}</label>'
            '<input type="search" id="find" autocomplete="off" aria-controls="hits story">'
            '<p id="count" role="status" aria-live="polite"></p><ul id="hits"></ul>'
            '<div id="story" tabindex="-1" aria-live="polite"></div></div>',
        )

    def html(self) -> str:
        """The page."""
        script = base64.b64encode(hashlib.sha256(_JS.encode()).digest()).decode()
        policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{script}'"
        links = "".join(f'<li><a href="#{name}">{escape(heading)}</a></li>' for name, heading, _ in self.sections)
        parts = "".join(
            f'<section aria-labelledby="h-{name}" id="{name}"><h2 id="h-{name}">{escape(heading)}</h2>{"".join(body)}</section>'
            for name, heading, body in self.sections
        )
        data = "" if self.groups is None else f'<script type="application/json" id="groups">{self.groups}</script>'
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            '<meta name="color-scheme" content="light dark">'
            f"<title>{escape(self.title)}</title><style>{_CSS}</style></head><body>"
            '<a class="skip" href="#main">Skip to the report</a>'
            f"<header><h1>{escape(self.title)}</h1><p>{escape(self.about)}</p>"
            f'<nav aria-label="Contents"><ol>{links}</ol></nav></header>'
            f'<main id="main">{parts}</main><footer><p>{escape(self.about)}</p></footer>'
            f"{data}<script>{_JS}</script></body></html>\n"
        )


def _png(figure: Figure) -> bytes:
    """The figure with 128 colours: a third of the bytes that all colours need."""
    canvas, bytes_ = FigureCanvasAgg(figure), io.BytesIO()
    figure.set_dpi(_DPI)
    canvas.draw()  # type: ignore[no-untyped-call]
    picture = Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3].copy())  # type: ignore[no-untyped-call]
    picture.quantize(_COLOURS, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(bytes_, "png", optimize=True)
    return bytes_.getvalue()


def _right(number: bool) -> str:
    return ' class="n"' if number else ""


def _cell(value: Any, number: bool, name: str) -> str:
    if value is None:
        return f'<td{_right(number)} data-v="">-</td>' if number else "<td>-</td>"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"<td>{escape(str(value))}</td>"
    shown = f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"
    if name == "p-value" and value < 1e-4:
        shown = "&lt; 1e-4"
    return f'<td class="n" data-v="{value!r}">{shown}</td>' if number else f"<td>{shown}</td>"
