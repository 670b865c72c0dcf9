"""Construction: models that are partitioned while they are built, so that no rank ever holds one whole."""
