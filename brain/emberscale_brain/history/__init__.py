"""The configuration database: jobs, what was measured of them, what was planned for them, and what start-ups took."""
