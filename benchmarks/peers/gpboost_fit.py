"""``gpboost_fit.py rows.npz gaussian|bernoulli_logit method``: seconds, log-likelihood and peak memory of a fit as JSON.

Every column varies by client and by cluster, all independent. GPBoost maximises the likelihood; it has no REML.
"""

from __future__ import annotations

import json
import resource
import sys
import time

import gpboost
import numpy as np

path, family, method = sys.argv[1:4]
rows = np.load(path)
X, y = rows["X"], rows["y"]
slopes = [a for a in range(X.shape[1]) if not (X[:, a] == 1.0).all()]
start = time.perf_counter()
model = gpboost.GPModel(
    group_data=np.column_stack([rows["client"], rows["cluster"]]),
    group_rand_coef_data=np.column_stack([X[:, slopes], X[:, slopes]]),
    ind_effect_group_rand_coef=[1] * len(slopes) + [2] * len(slopes),
    drop_intercept_group_rand_effect=[True, True] if len(slopes) == X.shape[1] else None,
    likelihood=family,
    matrix_inversion_method=method,
)
ready = time.perf_counter()
model.fit(y=y, X=X)
told = {
    "seconds": time.perf_counter() - ready,
    "setup": ready - start,
    "log_likelihood": -float(model.get_current_neg_log_likelihood()),
    "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
}
print(json.dumps(told))
