"""The main job on a real model: an agent's long prompt, computed once and then loaded.  `python -m lmcache_engine_transformers.demo`"""
