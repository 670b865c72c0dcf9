"""Planning: what is decided for a model: how far ahead transfers start, and what fits a budget."""
