"""Products keep their full precision, and settings of torch are put back."""

import pytest
import torch

from fewshot_callbacks.engine.precision import full_precision


@pytest.mark.parametrize("setting", ["highest", "high", "medium"])
def test_the_setting_is_put_back_also_after_an_error(setting):
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(setting)
        with full_precision():
            assert torch.get_float32_matmul_precision() == "highest"
        with pytest.raises(ZeroDivisionError), full_precision():
            raise ZeroDivisionError
        assert torch.get_float32_matmul_precision() == setting
    finally:
        torch.set_float32_matmul_precision(before)


def test_products_stay_float32_under_autocast_and_have_no_gradient():
    weights = torch.randn(3, 3, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (weights @ weights).dtype == torch.bfloat16
        with full_precision():
            product = weights @ weights
        assert torch.is_autocast_enabled("cpu")
    assert product.dtype == torch.float32
    assert not product.requires_grad
    assert torch.is_grad_enabled()
