"""Codes are packed to bits, and what is no code is refused."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fewshot_callbacks.engine.codes.packing import pack_codes
from tests.engine.codes.cases import signs


class TestPacking:
    @given(st.integers(1, 5), st.integers(1, 200), st.integers(0, 2**31))
    def test_keeps_every_bit(self, items, bits, seed):
        codes = signs(items, bits, seed)
        packed = pack_codes(codes, "codes", "call")
        assert packed.bits == bits
        assert packed.words.shape == (items, math.ceil(bits / 64))
        unpacked = np.unpackbits(packed.words.numpy().view(np.uint8), axis=1, bitorder="little")
        assert unpacked[:, :bits].tolist() == (codes > 0).int().tolist()
        assert not unpacked[:, bits:].any()

    @pytest.mark.parametrize(
        "dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64]
    )
    def test_takes_zero_and_one_of_any_dtype(self, dtype):
        codes = signs(6, 70)
        expected = pack_codes(codes, "codes", "call").words
        assert torch.equal(pack_codes((codes > 0).to(dtype), "codes", "call").words, expected)

    def test_needs_a_64th_of_float32(self):
        words = pack_codes(signs(100, 512), "codes", "call").words
        assert words.element_size() * words.numel() * 32 == 100 * 512 * 4

    @pytest.mark.parametrize(
        ("codes", "message"),
        [
            (
                torch.tensor([[1.0, -1.0], [0.5, 2.0]]),
                r"2 of 4 values of codes are neither \(0.5, 2\). Pass codes.sign\(\)",
            ),
            (torch.full((3, 4), math.nan), r"12 of 12 values of codes are neither \(nan, nan, nan, ...\)"),
            (torch.tensor([[1, -1, 0]]), r"codes hold -1 and 0"),
            (torch.ones(3), r"codes have shape \(3,\); codes are \(items, bits\)"),
            (torch.ones(0, 3), r"codes have shape \(0, 3\)"),
            (torch.ones(3, 0), r"codes have shape \(3, 0\)"),
        ],
    )
    def test_refuses_what_is_no_code(self, codes, message):
        with pytest.raises(ValueError, match=message):
            pack_codes(codes, "codes", "call")
