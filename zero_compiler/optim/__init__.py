"""Optimizers whose states may rest on any tier, and whose update may run while backward does."""
