"""Makes what runs equal to what a job's plan asks for.

`reconcile`  the decision, pure: plan and observed instances in, actions out
`local`      instances as processes of this machine
"""
