"""The maths: tensors in, tensors or a small frozen result out. No Lightning, no state, no logging."""
