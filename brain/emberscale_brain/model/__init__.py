"""The throughput model: how a job's speed depends on its shape, learned from its profiles.

* `predict`: the features of DLRover-RM's equations, and what a fit says about shapes.
* `window`: a job's profiles, summed up per shape.
* `prior`: what is believed before there are measurements.
* `fit`: coefficients from window and prior.
"""
