"""Binary codes: packing, and ranks from Hamming distances."""

from fewshot_callbacks.engine.codes.packing import Codes, pack_codes

__all__ = ["Codes", "pack_codes"]
