"""Adapters to other libraries, each beside the library itself."""
