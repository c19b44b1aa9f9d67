"""What all figures have in common."""

import textwrap
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from manynodes.base.errors import drawable, shortened

# Okabe and Ito's colours, for any colour vision.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLE: dict[Any, Any] = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.h_pad": 0.12,
    # All are written, and then closed.
    "figure.max_open_warning": 0,
    "figure.constrained_layout.w_pad": 0.12,
    "font.size": 11,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    # Of a curve of many points, what differs by less than a pixel is left out.
    "path.simplify_threshold": 1.0,
    # Text as text: in an SVG in any script, in a PDF such that it can be edited.
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    # What stands between two dollar signs is no formula.
    "text.parse_math": False,
    # With these settings the same table gives the same bytes.
    "svg.hashsalt": "ddp",
}


TITLE_CHARACTERS = 8.5  # of a title, for each inch
LONGEST = 28  # characters of a name in a figure
LONGEST_SIDE = 36  # of what stands along a side of a panel


def label(text: str, most: int = LONGEST) -> str:
    """A name or a value of the user's, as a figure shows it: one of any length would leave no room
    for what is drawn.

    Args:
        most: characters.
    """
    return shortened(drawable(text), most)


def entitle(figure: Figure, words: str, drawn: str) -> None:
    """Give it a title, in as many lines as it needs, and a label for who cannot see it.

    Args:
        drawn: a sentence.
    """
    figure.set_label(drawable(drawn))
    width = int(TITLE_CHARACTERS * figure.get_figwidth())
    lines = textwrap.fill(drawable(words), width, break_on_hyphens=False)
    figure.suptitle(lines, x=0.02, ha="left", fontweight="bold")


def colour_of(number: int, groups: int) -> Any:
    return (
        PALETTE[number]
        if groups <= len(PALETTE)
        else plt.get_cmap("viridis")(number / (groups - 1))
    )
