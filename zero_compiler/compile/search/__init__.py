"""The search for a plan within budgets: what is tried, in which order, and what ranks agree on."""
