"""Reuse the KV cache of prompt prefixes in Hugging Face transformers, across calls, processes and machines.

with open_prefix_cache(model, "lmcache.yaml") as prefix:
    output, report = prefix.generate(input_ids, max_new_tokens=64)
"""

from .errors import Unsupported
from .namespace import family_of, weights_digest
from .prefix import Generation, Limits, PrefixCache, Report, Restored, open_prefix_cache

__all__ = [
    "Generation",
    "Limits",
    "PrefixCache",
    "Report",
    "Restored",
    "Unsupported",
    "family_of",
    "open_prefix_cache",
    "weights_digest",
]
