"""One style for the pictures of a model: colours that colour-blind readers can tell apart, light and dark."""

from __future__ import annotations

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


LIGHT = Theme("#1c1c1c", "#ffffff", "#9a9a9a", "#0072b2", "#d55e00", "#1c1c1c", "#cc79a7", "Blues")
DARK = Theme("#ececec", "#16181c", "#7d828a", "#56b4e9", "#e69f00", "#f4f4f4", "#e78ac3", "Blues_r")


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
        "legend.facecolor": theme.paper,
        "legend.edgecolor": "none",
        "legend.framealpha": 0.75,
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


def _wrap_labels(ax: Axes, figure: Figure) -> None:
    """Break the labels of axes that are too short for them."""
    place = ax.get_position()
    for axis, length in ((ax.xaxis, figure.get_figwidth() * place.width), (ax.yaxis, figure.get_figheight() * place.height)):
        lines = wrap(
            axis.label.get_text(), max(16, int(130 * length / float(axis.label.get_fontsize()))), break_on_hyphens=False
        )
        axis.set_label_text("\n".join(lines))


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
    figure.draw_without_rendering()  # labels determine how large the axes are
    _wrap_labels(ax, figure)
    figure.draw_without_rendering()
    width = figure.get_figwidth() * ax.get_position().width
    ax.set_title("\n".join(wrap(title, max(24, int(10.4 * width)), break_on_hyphens=False)), loc="left", parse_math=False)
    return ax
