"""Profiles a job: `measure` runs it, `roof` bounds its speed, `job_profile` compares them, and `picture` draws it."""
