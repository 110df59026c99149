"""The checks of the tests: wrong sizes and types are refused in the whole package, and can be switched off."""

import pytest
import torch
from jaxtyping import TypeCheckError

from fewshot_callbacks.functional import DynamicsHistory
from fewshot_callbacks.functional.discriminant_ratio import unit_rows


@pytest.mark.parametrize("work", [lambda: unit_rows(torch.ones(3)), lambda: DynamicsHistory("one", ())])
def test_sizes_and_types_of_functions_and_dataclasses_are_checked(work):
    with pytest.raises(TypeCheckError):
        work()


def test_users_are_not_checked(as_users_run_it):
    with pytest.raises(ValueError, match="3 steps came with 0 measures"):
        DynamicsHistory("one", ())
