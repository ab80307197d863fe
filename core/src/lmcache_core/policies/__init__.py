"""The eviction policies that come with core; each is an entry point like any other."""
