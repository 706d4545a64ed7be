"""Request files in, result files out: what the `embed`, `rerank`, `score` and `inspect` commands share."""
