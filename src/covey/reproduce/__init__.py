"""The studies of ``covey reproduce``: the experiments of arXiv:2204.13619, and questions that the paper leaves open."""
