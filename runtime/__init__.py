"""What runs a Program: the session, copies between tiers, the autograd bridge and the reference executor. It decides nothing."""
