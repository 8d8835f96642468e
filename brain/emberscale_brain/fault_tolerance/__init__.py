"""Which way of surviving failures costs a job least, and how often it should save."""
