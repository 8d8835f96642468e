"""The public face of Emberscale: the `emberscale` command line."""
