"""The throughput model: how a job's speed depends on its shape, learned from its profiles.

* `predict`: the features of DLRover-RM's equations, and the predictions of a fit.
* `window`: a job's profiles, summarized per shape.
* `prior`: the belief about the coefficients before there are measurements.
* `fit`: coefficients from window and prior.
"""
