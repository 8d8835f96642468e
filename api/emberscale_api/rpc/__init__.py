"""The control plane: gRPC stubs generated from the protos beside this file.

`codec`, `running_codec` and `fields` convert and check messages; every call carries a `token`, over `tls` if mounted.
"""
