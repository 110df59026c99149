"""Adapters to other libraries, each compared with the library itself."""
