"""A run on this machine.

* `folder`, `record`, `metrics`: whether a run may use a folder, and what it keeps there.
* `preflight`, `brain_choice`: before it starts. `resumption`: what may change before it continues.
* `scaling`, `draining`, `drilling`, `interruption`: what people may do to it while it is under way. `master`: how some
  of them ask its master.
* `checkpoints`, `hot`, `summary`, `audit`: what it leaves, and whether every sample was applied once.
"""
