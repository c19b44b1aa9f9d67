"""What all figures have in common."""

from typing import Any

import matplotlib.pyplot as plt

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
    # With these settings the same table gives the same bytes.
    "svg.hashsalt": "ddp",
}


def colour_of(number: int, groups: int) -> Any:
    return (
        PALETTE[number]
        if groups <= len(PALETTE)
        else plt.get_cmap("viridis")(number / (groups - 1))
    )
