"""The main job on a real model: an agent's long prompt is computed once and then loaded."""
