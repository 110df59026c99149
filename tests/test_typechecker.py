"""The checks of the tests: wrong sizes and types are refused where an import hook writes them, and can be switched off."""

from dataclasses import dataclass

import pytest
import torch
from jaxtyping import Float, TypeCheckError
from torch import Tensor

from tests.typechecker import LIVES, jaxtyped


@jaxtyped()
def product(left: Float[Tensor, "rows dim"], right: Float[Tensor, "columns dim"]) -> Float[Tensor, "rows columns"]:
    return left @ right.T if len(left) else left


@jaxtyped()
@dataclass(frozen=True)
class Share:
    value: "float"
    rows: "Float[Tensor, 'rows dim'] | None" = None


def outer(result):
    @jaxtyped()
    def inner() -> int:
        return result

    return inner()


def test_sizes_are_those_of_the_other_arguments_and_of_the_result():
    three, four = torch.ones(2, 3), torch.ones(2, 4)
    assert product(three, torch.ones(5, 3)).shape == (2, 5)
    assert product(four, four).shape == (2, 2)  # sizes are those of one call
    for wrong in [(three, four), (three[0], three), (three, three.long()), (three[:0], torch.ones(5, 3)), (1, three)]:
        with pytest.raises(TypeCheckError):
            product(*wrong)
    with pytest.raises(TypeError):
        product(three)


def test_a_dataclass_is_checked_where_it_is_made():
    assert Share(1, torch.ones(2, 3)).value == 1  # an int is a fine float
    for wrong in [("1",), (1.0, torch.ones(2))]:
        with pytest.raises(TypeCheckError):
            Share(*wrong)


def test_a_function_inside_another_is_checked_in_its_first_lives():
    for _ in range(LIVES):
        with pytest.raises(TypeCheckError):
            outer("one")
    assert outer("one") == "one"


def test_users_are_not_checked(as_users_run_it):
    assert product(torch.ones(0, 3), torch.ones(5, 3)).shape == (0, 3)
    assert Share("1").value == "1"
