"""What holds for every test."""

from hypothesis import HealthCheck, settings

# Whether an example is slow says how busy the machine is, and kernels are compiled by the first that runs them.
settings.register_profile("emberscale", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("emberscale")
