"""What runs a Program: the session, tier copies, the autograd bridge and the reference executor. It decides nothing."""
