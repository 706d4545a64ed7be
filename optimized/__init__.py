"""The fast path: index builder, attention backends, model integration."""
