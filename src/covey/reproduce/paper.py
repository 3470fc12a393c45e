"""The numbers that the paper prints (Lyu, Hanzely, Kolar 2022): tables sum_n, cross_tab, acc_tab, and the text beside them."""

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
"""Distance of the estimates to the truth by rows a client and method: average, standard deviation and maximum over clients."""

CROSS_ENTROPY: dict[str, tuple[float, float, float, float, float, float]] = {
    "locally-trained": (0.413, 0.932, 0.173, 0.247, 0.313, 6.0),
    "single-model": (0.211, 0.176, 0.058, 0.201, 0.273, 2.76),
    "hierarchical": (0.215, 0.179, 0.069, 0.209, 0.283, 2.668),
}
"""Of the donors' ZIP codes: average, sd, quartiles, maximum."""

ACCURACY: dict[str, tuple[float, float, float, float, float, float]] = {
    "locally-trained": (0.940, 0.070, 0.919, 0.947, 1.0, 0.972),
    "single-model": (0.942, 0.067, 0.921, 0.948, 1.0, 0.986),
    "hierarchical": (0.942, 0.066, 0.921, 0.948, 1.0, 1.0),
}
"""Of the same: average, sd, quartiles, and the share of ZIP codes no less accurate than under the paper's model."""

ABOVE_ONE = {"hierarchical": 183, "single-model": 202}
"""ZIP codes with a cross-entropy above 1."""

CLIENTS, CLUSTERS = 29_490, 5
LAM, GAMMA = 0.01, 1.360
