"""The models, their initial parameters, and the transfer of these.

* `architectures`: the built-in models, and `build_model`.
* `mlp`, `cin`, `interaction`: their layers, with their own gradients; `dot_products`: the kernels of `interaction`.
* `vjp`: the logits of a batch, and its gradients; `loss`: the log loss of logits.
* `entrypoint`: a model of the user's own; `rehearsal`: one batch through it, before a job; `refusals`: what is wrong.
* `initial`: initial parameters, without PyTorch; `flat`: a module's parameters as one vector.
"""
