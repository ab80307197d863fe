"""What a KV cache would save: `lmc advise` from a model's config.json and a trace of requests."""
