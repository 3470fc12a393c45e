"""The numbers printed in the paper (Lyu, Hanzely and Kolar 2022, arXiv:2204.13619) that the studies compare with.

They come from Table 1 (sum_n), Table 2 (cross_tab), Table 3 (acc_tab) and the text of Section 6.
"""

from __future__ import annotations

SIMULATION: dict[tuple[int, str], tuple[float, float, float]] = {
    (10, "locally-trained"): (4.50, 0.981, 8.224),
    (10, "single-model"): (6.11, 0.968, 9.025),
    (10, "single-cluster"): (4.46, 0.958, 8.112),
    (10, "one-coin iterate"): (3.46, 0.689, 8.676),
    (100, "locally-trained"): (0.494, 0.093, 0.768),
    (100, "single-model"): (6.243, 1.003, 9.479),
    (100, "single-cluster"): (0.494, 0.093, 0.763),
    (100, "one-coin iterate"): (0.489, 0.093, 0.748),
}
"""Table 1, by rows of each client and method: average, standard deviation and maximum of the distance over clients."""

CROSS_ENTROPY: dict[str, tuple[float, float, float, float, float, float]] = {
    "locally-trained": (0.413, 0.932, 0.173, 0.247, 0.313, 6.0),
    "single-model": (0.211, 0.176, 0.058, 0.201, 0.273, 2.76),
    "hierarchical": (0.215, 0.179, 0.069, 0.209, 0.283, 2.668),
}
"""Table 2, over ZIP codes: average, standard deviation, quartiles and maximum."""

ACCURACY: dict[str, tuple[float, float, float, float, float, float]] = {
    "locally-trained": (0.940, 0.070, 0.919, 0.947, 1.0, 0.972),
    "single-model": (0.942, 0.067, 0.921, 0.948, 1.0, 0.986),
    "hierarchical": (0.942, 0.066, 0.921, 0.948, 1.0, 1.0),
}
"""Table 3: average, standard deviation, quartiles, and the share of ZIP codes no less accurate than with the paper's model."""

ABOVE_ONE = {"hierarchical": 183, "single-model": 202}
"""Number of ZIP codes with a cross-entropy above 1."""

CLIENTS, CLUSTERS = 29_490, 5
LAM, GAMMA = 0.01, 1.360
"""The donors: number of ZIP codes and income brackets, and the penalties that cross-validation chose."""
