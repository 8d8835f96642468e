"""The commands, a module each.

* `run`, `audit`, `profile`, `scale`, `drain`, `drill`: training here. `cluster`: all commands for a cluster.
* `checkpoints` with `restore`, `export`, `compare`: what was trained. `data` with `convert` and `skew`: data sets.
* `validate`, `explain`: manifests. `explain_plan`, `simulate`: plans.
* `options`, `layout`: arguments and options that several commands take.
"""
