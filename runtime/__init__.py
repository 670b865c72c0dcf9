"""What runs a Program: the session, the tiers, file I/O and the reference executor. It decides nothing."""
