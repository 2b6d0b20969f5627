"""A fleet in virtual time: the real scheduler and policy, and fitted pass times."""
