"""Popular choices (FAE, Adnan et al., VLDB 2022): which rows are hot, and which records access only hot rows.

* `sampler`, `access`: a sample of the data, and its accesses to each row; `kernels`: the loops over ids.
* `profiler`, `optimizer`: the size of the hot set at a threshold, and the threshold that fits a budget.
* `classifier`: hot rows and hot records by that threshold.
* `skew`, `traffic`: the skew of data, and its savings on the wire.
"""
