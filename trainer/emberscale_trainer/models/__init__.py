"""The models, their initial parameters, and the transfer of these.

`architectures`  the built-in models, and `build_model`   `mlp`, `interaction`  their layers, with their own gradients
`entrypoint`     a model of the user's own               `refusals`  what is wrong with it
`initial`        initial parameters, without PyTorch     `flat`      a module's parameters as one vector
`loss`           the log loss of logits                  `rehearsal` one batch through a user's model, before a job
"""
