"""The control plane: gRPC stubs generated from the protos beside this file, and the token that every call carries."""
