"""A model for serving: plain tensors (`export`, in a `table_file` each) and a `program` that needs only torch."""
