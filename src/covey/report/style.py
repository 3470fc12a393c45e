"""One style for the pictures of a model: colours that colour-blind readers can tell apart, light and dark."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FuncFormatter

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Theme:
    """Colours: of text and axes, of the paper, of faint marks, and of the three levels (after Okabe and Ito)."""

    ink: str
    paper: str
    faint: str
    client: str
    cluster: str
    overall: str
    warning: str
    ramp: str
    idle: str
    ends: tuple[float, float]  # the part of the ramp that differs enough from the paper


LIGHT = Theme("#1c1c1c", "#ffffff", "#9a9a9a", "#0072b2", "#d55e00", "#1c1c1c", "#cc79a7", "Blues", "#dddddd", (0.25, 1.0))
DARK = Theme("#ececec", "#16181c", "#7d828a", "#56b4e9", "#e69f00", "#f4f4f4", "#e78ac3", "Blues_r", "#3b4048", (0.1, 0.95))


def settings(theme: Theme) -> Any:
    """The settings of matplotlib for a theme."""
    lines = dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "text.color"), theme.ink)
    paper = dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), theme.paper)
    return {
        **lines,
        **paper,
        "axes.titlecolor": theme.ink,
        "font.size": 11,
        "axes.titlesize": 12,
        "axes.labelsize": 11,
        "legend.fontsize": 10,
        "legend.frameon": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "lines.linewidth": 1.6,
        "svg.hashsalt": "covey",  # with a random salt the same figure would give other bytes in every run
        "svg.fonttype": "path",
    }


Draw = Callable[["Axes", Theme], str]
"""Draws on axes in the colours of a theme, and returns the title: a sentence that states the finding."""


def draw_on(ax: Axes | None, draw: Draw, *, dark: bool = False, size: tuple[float, float] = (8.0, 5.0)) -> Axes:
    """Draw on the given axes, or on those of a new figure of pyplot, and put the title above them."""
    theme = DARK if dark else LIGHT
    if ax is None:
        import matplotlib.pyplot as plt

        with mpl.rc_context(settings(theme)):
            return _titled(plt.subplots(figsize=size, layout="constrained")[1], draw, theme)
    return _titled(ax, draw, theme)


def figure_of(draw: Draw, *, dark: bool = False, size: tuple[float, float] = (8.0, 5.0)) -> Figure:
    """A figure that is not connected to a window, for files."""
    theme = DARK if dark else LIGHT
    with mpl.rc_context(settings(theme)):
        figure = Figure(figsize=size, layout="constrained")
        _titled(figure.subplots(), draw, theme)
    return figure


def balanced(text: str, width: int) -> str:
    """The text in as few lines as ``width`` characters allow, the longest of them as short as possible."""
    text = re.sub(r"(?<=\d) (?=([kMGT]?B|s|min|h|d)\b)", "\u00a0", text)  # a number and its unit stay together
    lines = wrap(text, width, break_on_hyphens=False)
    while width > 1 and len(shorter := wrap(text, width - 1, break_long_words=False, break_on_hyphens=False)) == len(lines):
        if max(map(len, shorter), default=0) > width:
            break
        lines, width = shorter, width - 1
    return "\n".join(lines)


def _lay_out(figure: Figure) -> None:
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure)


def _wrap_labels(ax: Axes, figure: Figure) -> None:
    """Break the labels of axes that are too short for them."""
    place = ax.get_position()
    for axis, length in ((ax.xaxis, figure.get_figwidth() * place.width), (ax.yaxis, figure.get_figheight() * place.height)):
        most = max(16, int(130 * length / float(axis.label.get_fontsize())))
        axis.set_label_text(balanced(" ".join(axis.label.get_text().split()), most))


def size_on(width: float) -> tuple[float, int]:
    """The size of a title in points, smaller on axes that are narrow (in inches), and how many characters a line has."""
    size = 12.0 * min(1.0, max(0.8, width / 5.0))
    return size, max(24, int(10.4 * width * 12.0 / size))


def room_on(ax: Axes, title: int) -> float:
    """How many points of height are left on the axes under a legend and a title of so many characters."""
    figure = ax.get_figure(root=True)
    if figure is None:
        return 260.0
    place = ax.get_position()
    height = figure.get_figheight() * min(1.0, place.height / 0.77)
    size, most = size_on(0.75 * figure.get_figwidth() * min(1.0, place.width / 0.77))
    return max(40.0, 72 * height - 1.4 * size * -(-title // most) - 75)


def _legend_above(ax: Axes, figure: Figure, fontsize: float) -> float:
    """Put the legend between the title and the axes, where it covers no data; returns its height in points."""
    handles, labels = ax.get_legend_handles_labels()
    if ax.get_legend() is None or not handles:
        return 0.0
    width = ax.get_window_extent().width
    labels = [balanced(" ".join(label.split()), max(12, int(130 * width / figure.dpi / fontsize) - 6)) for label in labels]
    for columns in range(len(handles), 0, -1):
        legend = ax.legend(
            handles, labels, loc="lower left", bbox_to_anchor=(0.0, 1.0), borderaxespad=0.2, borderpad=0.1, ncols=columns,
            handlelength=1.6, columnspacing=1.2, fontsize=fontsize,
        )  # fmt: skip
        size = legend.get_window_extent()
        if size.width <= width:
            break
    return float(size.height * 72 / figure.dpi)


def _titled(ax: Axes, draw: Draw, theme: Theme) -> Axes:
    with mpl.rc_context({"text.parse_math": False}):  # a dollar sign in the name of a column or client is no formula
        title, figure = draw(ax, theme), ax.get_figure(root=True)
    for axis in (ax.xaxis, ax.yaxis):  # texts that the axes had before
        axis.label.set_parse_math(False)
        named = isinstance(axis.get_major_formatter(), FixedFormatter | FuncFormatter)
        for label in axis.get_ticklabels():
            label.set_parse_math(not named)  # matplotlib writes numbers as formulas
    if figure is None:  # axes that were removed from their figure
        ax.set_title(title, loc="left", parse_math=False)
        return ax
    for _ in range(3):  # the title and the legend determine how large the axes are, and the axes how titles and labels break
        _lay_out(figure)
        size, most = size_on(figure.get_figwidth() * ax.get_position().width)
        with mpl.rc_context({"text.parse_math": False}):
            above = _legend_above(ax, figure, size - 2.0)
        ax.set_title(balanced(title, most), loc="left", parse_math=False, pad=6.0 + above, fontsize=size)
        _lay_out(figure)
        _wrap_labels(ax, figure)
    return ax
