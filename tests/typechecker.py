"""The run-time type checker of the tests: an int is a fine float, as PEP 484 says."""

from beartype import BeartypeConf, beartype

typechecked = beartype(conf=BeartypeConf(is_pep484_tower=True))
