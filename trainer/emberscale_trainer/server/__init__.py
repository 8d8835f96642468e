"""The parameter server: rows and a slice of the dense vector, each batch applied once."""
