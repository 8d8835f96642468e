"""Popular choices (FAE, Adnan et al., VLDB 2022): which rows are hot, and which records access hot rows only.

* `sampler`, `access`: part of the data, and how often it accesses each row; `kernels`: the loops over ids.
* `profiler`, `optimizer`: how large the hot set is at a threshold, and the threshold that fits a budget.
* `classifier`: hot rows and hot records by that threshold.
* `skew`, `traffic`: how skewed data is, and what that would save on the wire.
"""
