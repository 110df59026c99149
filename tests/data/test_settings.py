"""Each setting of a data module is written once: the constructor, the help, the hyperparameters follow from it."""

import inspect
from dataclasses import fields
from pathlib import Path

import pytest
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningDataModule

from fewshot_callbacks import data
from fewshot_callbacks.data._settings import described, with_settings

MODULES = {name: getattr(data, name) for name in data.__all__ if name.endswith("DataModule")}
INHERITED = {
    *("ways", "shots", "queries", "episodes", "episodes_per_batch", "classes_per_batch", "items_per_class", "seed"),
    *("episodic_evaluation", "test_ways", "test_shots", "test_queries", "test_episodes", "test_seed", "val_episodes"),
    *("batch_size", "num_workers"),
}
PHOTOGRAPHS = {"root", "image_size", "cache_mb", "resize", "augment", "min_area", "flip", "jitter", "mean", "std"}
OWN = {
    "CUBDataModule": PHOTOGRAPHS | {"partial"},
    "GlyphDataModule": {"augment", "size", "min_faces"},
    "ImageFolderDataModule": PHOTOGRAPHS
    | {"train_folder", "val_folder", "test_folder"}
    | {"val_share", "test_share", "split_seed"},
    "LogoDet3KDataModule": PHOTOGRAPHS | {"margin", "min_boxes", "val_share", "test_share", "split_seed", "partial"},
    "MiniImageNetDataModule": PHOTOGRAPHS | {"partial"},
    "OmniglotDataModule": {"root", "image_size", "cache_mb", "val_alphabets", "download", "partial"},
}
DEFAULTS = """
                         ways shots queries batch_size test_ways test_shots test_queries image_size min_area flip
ImageFolderDataModule    20   5     15      128        5         5          15           84         0.35     0.5
CUBDataModule            5    5     15      128        5         5          15           84         0.35     0.5
MiniImageNetDataModule   5    5     15      128        5         5          15           84         0.35     0.5
LogoDet3KDataModule      20   5     15      128        5         5          15           84         0.6      0.0
OmniglotDataModule       20   1     5       128        5         1          15           28         -        -
GlyphDataModule          20   1     5       512        5         1          9            -          -        -
"""


def arguments(module: type) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(module).parameters)


@pytest.mark.parametrize("name", MODULES)
def test_the_constructor_has_the_settings_of_the_bases_and_its_own(name: str) -> None:
    found = arguments(MODULES[name])
    assert found.keys() == INHERITED | OWN[name]
    positional = [name for name, argument in found.items() if argument.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert positional == (["root"] if "root" in OWN[name] else [])


def test_each_data_module_keeps_its_own_defaults() -> None:
    names, *rows = (line.split() for line in DEFAULTS.strip().splitlines())
    assert {row[0] for row in rows} == MODULES.keys()
    for module, *values in rows:
        found = arguments(MODULES[module])
        assert [str(found[name].default) if name in found else "-" for name in names] == values


@pytest.mark.parametrize("name", MODULES)
def test_the_docstring_and_the_help_describe_every_setting(name: str) -> None:
    module = MODULES[name]
    assert set(described(module.__doc__)) == arguments(module).keys()
    parser = ArgumentParser()
    parser.add_class_arguments(module, "data")
    helps = {action.dest: action.help for action in parser._actions if action.dest.startswith("data.")}
    assert helps.keys() == {f"data.{argument}" for argument in arguments(module)}
    assert all(text and text != "==SUPPRESS==" for text in helps.values())


def test_a_description_that_a_subclass_gives_replaces_that_of_its_base() -> None:
    kept, replaced = (
        described(data.CUBDataModule.__doc__)["resize"],
        described(data.LogoDet3KDataModule.__doc__)["resize"],
    )
    assert kept.startswith("    resize: Shorter side of an evaluation image before its centre is cut out, or a pair")
    assert replaced.startswith("    resize: Side of the square that a training image is squeezed to")
    assert data.LogoDet3KDataModule.__doc__.count(" resize: ") == 1


@pytest.mark.parametrize("name", MODULES)
def test_an_argument_that_is_none_is_named(name: str) -> None:
    root = ["anywhere"] if "root" in OWN[name] else []
    with pytest.raises(TypeError, match="unexpected keyword argument 'way'"):
        MODULES[name](*root, way=3)


@pytest.mark.parametrize("name", MODULES)
def test_hyperparameters_are_the_settings_as_they_were_given(name: str) -> None:
    """So a default that follows from another setting follows again when a checkpoint is loaded with others."""
    root = {"root": "anywhere"} if "root" in OWN[name] else {}
    module = MODULES[name](**root, ways=3)
    expected = {name: argument.default for name, argument in arguments(type(module)).items()}
    assert dict(module.hparams) == expected | root | {"ways": 3}
    assert module.val_episodes == 600
    assert isinstance(module.queries, int)


def test_a_subclass_of_ones_own_may_add_settings_either_way() -> None:
    @with_settings
    class Birds(data.ImageFolderDataModule):
        """Birds.

        Args:
            calls: Whether they are heard.
        """

        ways: int = 2
        calls: bool = False

    class Owls(data.ImageFolderDataModule):
        def __init__(self, root: str, night: bool = True, **settings: int) -> None:
            super().__init__(root, **settings)
            self.save_hyperparameters({"night": night})

    birds, owls = Birds("birds", calls=True), Owls("owls", night=False, ways=4)
    assert (birds.ways, birds.hparams["ways"], birds.hparams["calls"], birds.root) == (2, 2, True, Path("birds"))
    assert list(described(Birds.__doc__))[:2] == ["calls", "root"]
    assert (owls.hparams["night"], owls.hparams["ways"]) == (False, 4)


def test_a_class_without_a_docstring_has_none_afterwards() -> None:
    @with_settings
    class Bare:
        ways: int = 20

    assert Bare().ways == 20
    assert Bare(ways=3) != Bare(ways=3)
    assert [setting.name for setting in fields(Bare)] == ["ways"]
    assert Bare.__doc__ is None or "Args" not in Bare.__doc__


def test_two_data_modules_of_the_same_settings_are_two() -> None:
    one, other = (data.GlyphDataModule() for _ in range(2))
    assert isinstance(one, LightningDataModule)
    assert len({one, other}) == 2
