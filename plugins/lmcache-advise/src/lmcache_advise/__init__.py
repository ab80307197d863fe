"""What a KV cache would save (`lmc advise`, from a model and a trace), and what it does save (`lmc bench serve`)."""
