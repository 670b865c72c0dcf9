"""Parameters: shards at rest, full weights inside a forward, gradients, and what surrounds them."""
