"""The parameter server: stores rows and pieces of the dense vector, and applies each batch once."""
