"""The checks of the tests: wrong sizes and types are refused in the whole package, and can be switched off."""

import pytest
import torch
from jaxtyping import TypeCheckError

from fewshot_callbacks.functional import DynamicsHistory
from fewshot_callbacks.functional.discriminant_ratio import unit_rows
from tests.messages import refused
from tests.typechecker import CHECKED


@pytest.mark.skipif(not CHECKED, reason="FEWSHOT_CHECK_SHAPES=0")
@pytest.mark.parametrize("work", [lambda: unit_rows(torch.ones(3)), lambda: DynamicsHistory("one", ())])
def test_sizes_and_types_of_functions_and_dataclasses_are_checked(work):
    with pytest.raises(TypeCheckError):
        work()


def test_users_are_not_checked(as_users_run_it):
    with refused(ValueError, "steps", 3, 0):
        DynamicsHistory("one", ())
