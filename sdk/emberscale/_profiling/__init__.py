"""Profiles a job's time: a short run of it, measured from outside, and the roof that no run can pass."""

from emberscale._profiling.job_profile import TimeBreakdown
from emberscale._profiling.measure import ProfileFailedError, profile_job

__all__ = ["ProfileFailedError", "TimeBreakdown", "profile_job"]
