"""The brain as a service: profiles in, plans out."""
