"""Equal rows have equal numbers, and no others have."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshot_callbacks.engine import candidates as candidates_module
from fewshot_callbacks.engine.duplicates import row_numbers

ROWS = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-30, 1e30, 1 / 3])


class TestRowNumbers:
    @settings(max_examples=45, deadline=None)
    @given(
        st.integers(1, 3).flatmap(lambda d: st.lists(st.lists(ROWS, min_size=d, max_size=d), min_size=1, max_size=12))
    )
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    def test_equal_numbers_for_equal_rows_and_no_others(self, dtype, rows):
        vectors = torch.tensor(rows, dtype=torch.float64).clamp(-6e4, 6e4).to(dtype)
        number = row_numbers(vectors)
        for i in range(len(rows)):
            for j in range(len(rows)):
                assert (number[i] == number[j]) == bool((vectors[i] == vectors[j]).all())
        assert sorted(set(number.tolist())) == list(range(len(set(number.tolist()))))

    def test_across_the_slices_in_which_rows_are_compared(self):
        vectors = torch.randn(3, 4).repeat(4000, 1)  # 12,000 rows, three slices
        number = row_numbers(vectors)
        assert torch.equal(number, number[:3].repeat(4000))
        assert len(number[:3].unique()) == 3

    def test_float64_rows_that_float32_cannot_tell_apart(self):
        vectors = torch.tensor([[1.0], [1.0 + 1e-12], [1.0]], dtype=torch.float64)
        number = row_numbers(vectors).tolist()
        assert number[0] == number[2] != number[1]

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    def test_codes_differ_in_the_sign_bit_alone(self, dtype):
        codes = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]], dtype=dtype)
        number = row_numbers(codes.repeat(3, 1)).view(3, 4)
        assert len(number[0].unique()) == 4
        assert bool((number == number[0]).all())

    def test_rows_with_one_hash_are_told_apart(self, monkeypatch):
        # with all factors 1 the hash is the sum of the bits, the same for each order of the components
        real = torch.randint
        monkeypatch.setattr(
            candidates_module.torch, "randint", lambda low, high, size, generator: real(1, size, generator=generator)
        )
        vectors = torch.tensor([[1.0, 2.0], [2.0, 1.0], [1.0, 2.0], [3.0, 4.0], [4.0, 3.0], [0.0, 0.0]])
        number = row_numbers(vectors).tolist()
        assert number[0] == number[2]
        assert len(set(number)) == 5

    def test_does_not_touch_the_global_random_state(self):
        state = torch.get_rng_state()
        row_numbers(torch.randn(3, 4, generator=torch.Generator().manual_seed(0)))
        assert torch.equal(torch.get_rng_state(), state)
