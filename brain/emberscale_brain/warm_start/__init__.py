"""The first shape of a job, from similar jobs of the past."""
