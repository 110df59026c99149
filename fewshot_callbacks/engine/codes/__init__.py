"""Binary codes: packing, and ranks from Hamming distances."""
