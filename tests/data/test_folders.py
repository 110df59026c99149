"""Folders of images: what is served, what is refused, and in which words."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from PIL import Image
from torch import Tensor

from fewshot_callbacks.callbacks import GeneralizationGapMonitor
from fewshot_callbacks.data import (
    CUBDataModule,
    ImageFolderDataModule,
    ImageFolderSet,
    LogoDet3KDataModule,
    MiniImageNetDataModule,
    OmniglotDataModule,
)
from fewshot_callbacks.functional.episodes import sample_episodes
from fewshot_callbacks.protonet import ProtoNet

CLASSES = {"train": ("ant", "bee", "cat"), "val": ("dog", "eel"), "test": ("fox", "gnu")}
SMALL = {"image_size": 8, "ways": 2, "shots": 1, "queries": 2, "episodes": 2, "test_ways": 2, "test_queries": 1}
SMALL = {**SMALL, "test_shots": 1, "test_episodes": 3, "batch_size": 3}
PLAIN = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    colour = 0
    for split, classes in CLASSES.items():
        for name in classes:
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for i in range(4):
                colour += 1
                Image.new("RGB", (20, 10), (colour, 2 * colour, 255 - colour)).save(folder / f"{i}.png")
    return tmp_path


def test_evaluation_images_come_once_in_order_resized_and_normalised(root: Path) -> None:
    data = ImageFolderDataModule(root, **SMALL, mean=(0.5, 0.5, 0.5), std=(0.25, 0.5, 1.0))
    data.setup("test")
    batches = list(data.test_dataloader())
    assert [len(labels) for _, labels in batches] == [3, 3, 2]
    assert all(isinstance(batch, tuple) for batch in batches)
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert labels.tolist() == [0] * 4 + [1] * 4
    assert images.shape == (8, 3, 8, 8)
    colour = torch.arange(21, 29.0)  # the test images are the last eight
    raw = torch.stack([colour, 2 * colour, 255 - colour], dim=1) / 255
    expected = (raw - 0.5) / torch.tensor([0.25, 0.5, 1.0])
    assert torch.allclose(images, expected[:, :, None, None].expand_as(images), atol=1e-5)


@pytest.mark.parametrize("module", [ImageFolderDataModule, CUBDataModule, MiniImageNetDataModule])
def test_evaluation_images_may_be_resized_to_a_square_or_another_fixed_size(module: type) -> None:
    """Against Pillow alone: resize to the pair, whatever the shape of the image, then cut the centre out."""
    image = Image.fromarray((torch.arange(3 * 30 * 21) * 37 % 256).reshape(30, 21, 3).to(torch.uint8).numpy())
    for height, width in ((12, 12), (10, 14)):
        data = module("anywhere", **{**SMALL, **PLAIN}, resize=(height, width))
        top, left = (height - 8) // 2, (width - 8) // 2
        fitted = image.resize((width, height), Image.Resampling.BILINEAR).crop((left, top, left + 8, top + 8))
        expected = torch.tensor(list(fitted.get_flattened_data())).reshape(8, 8, 3).permute(2, 0, 1) / 255
        torch.testing.assert_close(data._transform(augment=False)([image])[0], expected)


def test_random_crops_have_the_area_that_is_asked_for() -> None:
    """Each pixel knows its column and row, so a crop without a resize tells its own sides; 0.08 is torchvision's default."""
    side, smallest, areas = 101, 0.08, []
    column, row = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="xy")
    image = Image.fromarray(torch.stack([column, row, row], dim=-1).to(torch.uint8).numpy())
    plain = {**SMALL, **PLAIN, "image_size": 64, "flip": 0.0, "jitter": 0.0}
    transform = ImageFolderDataModule("anywhere", **plain, min_area=smallest)._transform(augment=True)
    torch.manual_seed(0)
    for _ in range(400):
        crop = (
            255 * transform([image])[0]
        )  # (channel, 64, 64); neighbouring pixels of a crop of w columns differ by w / 64
        width, height = crop[0, 5, 59] - crop[0, 5, 4], crop[1, 59, 5] - crop[1, 4, 5]  # of 55 of its 64 steps
        areas.append((width * height / (55 * side / 64) ** 2).item())
    assert smallest - 0.01 < min(areas) < smallest + 0.05
    assert max(areas) > 0.9


def test_training_batches_are_episodes_and_augmented(root: Path) -> None:
    data = ImageFolderDataModule(root, **SMALL, **PLAIN)
    data.setup("fit")
    for images, labels in data.train_dataloader():
        assert images.shape == (6, 3, 8, 8)
        assert labels.reshape(2, 3).unique(dim=1).shape == (2, 1)
    torch.manual_seed(1)
    one = data.images("train").__getitems__([0, 5])
    torch.manual_seed(2)
    other = data.images("train").__getitems__([0, 5])
    assert one[1].tolist() == [0, 1]
    assert not torch.equal(one[0], other[0])
    plain = ImageFolderDataModule(root, **SMALL, **PLAIN, augment=False).images("train")
    assert torch.equal(plain.__getitems__([0, 5])[0], plain.__getitems__([0, 5])[0])
    assert torch.equal(plain[5][0], plain.__getitems__([0, 5])[0][1])


def test_episodic_evaluation_gives_fixed_episodes_for_any_number_of_workers(root: Path) -> None:
    expected = sample_episodes(torch.arange(8) // 4, ways=2, shots=1, queries=1, episodes=3, seed=5)
    for workers in (0, 1):
        data = ImageFolderDataModule(root, **SMALL, episodic_evaluation=True, test_seed=5, num_workers=workers)
        loader = data.test_dataloader()
        assert loader.batch_sampler.hash == expected.hash
        everything = data.images("test").__getitems__(list(range(8)))[0]
        for (images, _), episode in zip(loader, expected.indices, strict=True):
            assert torch.equal(images, everything[episode.flatten()])


@pytest.mark.parametrize(("given", "expected"), [({}, 3), ({"val_episodes": 2}, 2)])
def test_validation_may_have_fewer_episodes_than_the_test(root: Path, given: dict, expected: int) -> None:
    data = ImageFolderDataModule(root, **SMALL, episodic_evaluation=True, **given)
    assert len(list(data.val_dataloader())) == data.val_episodes == expected
    assert len(list(data.test_dataloader())) == 3


def test_what_a_model_needs_is_there(root: Path) -> None:
    data = ImageFolderDataModule(str(root), image_size=84, shots=5)
    assert (data.num_classes, data.in_channels, data.image_size, data.shots, data.resize) == (3, 3, 84, 5, 96)
    assert data.hparams["image_size"] == 84


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.validated = 0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.weight * batch[0].mean()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.validated += len(batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.filterwarnings("ignore:Total length of `list` across ranks is zero")  # that is the intention
@pytest.mark.parametrize(("val_folder", "validated"), [("val", 8), (None, 0), ("test", 8)])
def test_validation_follows_the_rule(root: Path, val_folder: str | None, validated: int) -> None:
    model = Model()
    Trainer(
        accelerator="cpu",
        max_epochs=1,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(model, ImageFolderDataModule(root, **SMALL, val_folder=val_folder))
    assert model.validated == validated


def test_without_validation_there_is_no_such_split(root: Path) -> None:
    data = ImageFolderDataModule(root, val_folder=None)
    assert data.val_dataloader() == []
    with pytest.raises(ValueError, match="There is no validation split: val_folder is None"):
        data.images("val")


def test_missing_folders_are_named_with_the_way_out(root: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere\. It should hold .* 'train', 'val' and 'test'\."):
        ImageFolderDataModule(tmp_path / "nowhere").setup("fit")
    with pytest.raises(
        FileNotFoundError, match=r"no folder 'dev' for val\. Make it, or .* or val_folder=None for no vali"
    ):
        ImageFolderDataModule(root, val_folder="dev").setup("fit")
    with pytest.raises(FileNotFoundError, match=r"no folder 'exam' for test\. Make it, or pass test_folder=\.\.\.\."):
        ImageFolderDataModule(root, test_folder="exam").setup("fit")
    with pytest.raises(FileNotFoundError, match=r"There is no folder .*nowhere"):
        ImageFolderSet(tmp_path / "nowhere", lambda image: torch.zeros(3, 1, 1))


def test_classes_without_images_are_named(root: Path) -> None:
    (root / "val" / "emu").mkdir()
    (root / "val" / "emu" / "notes.txt").write_text("no image")
    with pytest.raises(ValueError, match=r"1 class \('emu'\) of 3 in .*val without an image\. .* remove the folder\."):
        ImageFolderDataModule(root).setup("fit")
    for i in range(6):
        (root / "val" / f"x{i}").mkdir()
    with pytest.raises(ValueError, match=r"7 classes \('emu', 'x0', 'x1', 'x2', 'x3', \.\.\.\) of 9 in"):
        ImageFolderDataModule(root).setup("fit")


def test_a_split_without_classes_is_refused(root: Path) -> None:
    (root / "flat").mkdir()
    Image.new("RGB", (4, 4)).save(root / "flat" / "1.png")
    with pytest.raises(ValueError, match=r"flat holds no class: no folder is in it"):
        ImageFolderDataModule(root, test_folder="flat").setup("fit")


def test_shared_classes_are_named(root: Path) -> None:
    for name in ("ant", "bee"):
        (root / "test" / name).mkdir()
        Image.new("RGB", (4, 4)).save(root / "test" / name / "1.png")
    with pytest.raises(
        ValueError, match=r"'train' and 'test' share 2 classes \('ant', 'bee'\); .* Keep each class in on"
    ):
        ImageFolderDataModule(root).setup("fit")
    with pytest.raises(ValueError, match=r"'train' and 'train' share 3 classes"):
        ImageFolderDataModule(root, val_folder="train").setup("fit")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"image_size": 0}, "image_size is 0"),
        ({"resize": 80}, "resize is 80, smaller than image_size 84"),
        ({"resize": (96, 80)}, r"resize is \(96, 80\), smaller than image_size 84"),
        ({"val_episodes": 0}, "val_episodes is 0"),
        ({"min_area": 0.0}, r"min_area is 0\.0"),
        ({"flip": 1.5}, r"flip is 1\.5; it is a probability"),
        ({"jitter": -0.1}, r"jitter is -0\.1"),
        ({"std": (1.0, 0.0, 1.0)}, "std is .* images are divided by it"),
        ({"shots": 0}, "shots is 0"),
    ],
)
def test_wrong_settings_fail_in_the_constructor(wrong: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ImageFolderDataModule("anywhere", **wrong)


def test_a_class_too_small_for_the_episodes_is_named(root: Path) -> None:
    data = ImageFolderDataModule(root, **{**SMALL, "queries": 4})
    with pytest.raises(ValueError, match=r"needs 5 images per class; class 'ant' has 4, the smallest of 3 classes"):
        data.train_dataloader()


def test_training_images_are_served_as_in_an_evaluation(root: Path) -> None:
    data = ImageFolderDataModule(root, **SMALL, **PLAIN)
    plain = ImageFolderDataModule(root, **SMALL, **PLAIN, augment=False).images("train")
    images, labels = (torch.cat(parts) for parts in zip(*data.training_data_for_evaluation(), strict=True))
    assert torch.equal(images, plain.__getitems__(list(range(12)))[0])
    assert torch.equal(labels, plain.labels)


def test_the_gap_to_training_classes_needs_no_argument(tmp_path: Path) -> None:
    for split, count in (("train", 5), ("val", 4), ("test", 1)):
        for number in range(count):
            folder = tmp_path / split / f"{split}{number}"
            folder.mkdir(parents=True)
            for i in range(4):
                Image.new("RGB", (20, 20), (40 * number + i, 9 * i, 99)).save(folder / f"{i}.png")
    monitor = GeneralizationGapMonitor(classes=None, group_size=2, strict=True)
    trainer = Trainer(
        max_epochs=1,
        callbacks=[monitor],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    model = ProtoNet(in_channels=3, shots=1, evaluation={"ways": 2, "shots": 1, "queries": 1, "episodes": 3})
    trainer.fit(model, ImageFolderDataModule(tmp_path, **{**SMALL, "image_size": 16}))
    assert monitor.gap is not None
    assert monitor.gap.classes == (5, 4)
    assert monitor.gap.items_per_class == (4, 4)


@pytest.mark.parametrize(
    "module", [ImageFolderDataModule, CUBDataModule, MiniImageNetDataModule, OmniglotDataModule, LogoDet3KDataModule]
)
def test_what_a_checkpoint_holds_of_the_data_loads_anywhere(module: type[LightningDataModule], tmp_path: Path) -> None:
    """A Path in it would be refused, and a path of Windows could not be read elsewhere."""
    torch.save(dict(module(tmp_path).hparams), tmp_path / "hparams.pt")
    assert torch.load(tmp_path / "hparams.pt", weights_only=True)["root"] == str(tmp_path)


def test_evaluation_classes_that_are_too_small_are_named_before_a_training(root: Path) -> None:
    ImageFolderDataModule(root, **SMALL).check_evaluation()
    (root / "test" / CLASSES["test"][1] / "3.png").unlink()
    data = ImageFolderDataModule(root, **(SMALL | {"test_queries": 3}))
    name = CLASSES["test"][1]
    with pytest.raises(
        ValueError,
        match=rf"The test classes do not suffice .* with 3 queries needs 4 images per class; class '{name}' has 3",
    ):
        data.check_evaluation()
    (root / "val" / CLASSES["val"][0] / "3.png").unlink()
    both = rf"The val classes do not suffice .* class '{CLASSES['val'][0]}' has 3.* The test classes .* class '{name}' has 3"
    with pytest.raises(ValueError, match=both):
        ImageFolderDataModule(root, **(SMALL | {"test_queries": 3})).check_evaluation()


def test_each_split_that_is_too_small_is_named_with_the_options_that_would_fit(root: Path) -> None:
    for split in ("train", "val"):
        (root / split / CLASSES[split][0] / "3.png").unlink()
    settings = SMALL | {"queries": 3, "test_shots": 3}
    found = (
        "The train classes do not suffice for the requested episodes (--data.ways 2, --data.shots 1, --data.queries 3): "
        f"2-way 1-shot with 3 queries needs 4 images per class; class '{CLASSES['train'][0]}' has 3. "
        "Use --data.queries <= 2 or drop the class. "
        "The val classes do not suffice for the requested episodes (--data.test_ways 2, --data.test_shots 3, "
        f"--data.test_queries 1): 2-way 3-shot with 1 queries needs 4 images per class; class '{CLASSES['val'][0]}' has 3. "
        "Use --data.test_shots 1 with --data.test_queries <= 2 or drop the class."
    )
    with pytest.raises(ValueError, match=re.escape(found)):
        ImageFolderDataModule(root, **settings).check_splits("train", "val", "test")
    batches = ImageFolderDataModule(root, **settings, classes_per_batch=2, items_per_class=4)
    with pytest.raises(
        ValueError,
        match=r"The train classes do not suffice for the requested batches \(--data.classes_per_"
        r"batch 2, --data.items_per_class 4\): .* Use --data.items_per_class <= 3 or .* The val classes do",
    ):
        batches.check_splits("train", "val", "test")


# ------------------------------------------------------------------------------------------------- what lies in a folder


def grey_levels(folder: Path) -> list[float]:
    """The mean of each image as the model sees it, in [0, 1]."""
    images = ImageFolderSet(folder)
    return [round(images[index][0].mean().item(), 2) for index in range(len(images))]


def sixteen_bits(shape: tuple[int, int] = (10, 10)) -> np.ndarray:
    return np.linspace(0, 65535, num=shape[0] * shape[1]).reshape(shape).astype(np.uint16)


@pytest.mark.parametrize("ending", ["png", "tif", "pgm"])
def test_16_bit_greys_keep_their_greys(ending: str, tmp_path: Path) -> None:
    (tmp_path / "xray").mkdir()
    Image.fromarray(sixteen_bits()).save(tmp_path / "xray" / f"1.{ending}")
    pixels, _ = ImageFolderSet(tmp_path)[0]
    expected = torch.from_numpy(sixteen_bits() / 65535.0).float()
    torch.testing.assert_close(pixels, expected.expand(3, 10, 10), atol=0.5 / 255 + 1e-6, rtol=0)


@pytest.mark.parametrize(("mode", "words"), [("I", "32-bit integers"), ("F", "fractions")])
def test_numbers_without_a_known_range_are_refused_with_the_file(mode: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "depth").mkdir()
    Image.new(mode, (4, 4), 300).save(tmp_path / "depth" / "1.tif")
    with pytest.raises(
        ValueError, match=rf"1\.tif cannot be read as an image: it holds {words}, whose black and white"
    ):
        ImageFolderSet(tmp_path)[0]


@pytest.mark.parametrize("target", ["..", ".", "../bee", "../../train"])
def test_a_link_to_a_folder_that_is_read_already_is_refused(target: str, root: Path) -> None:
    (root / "train" / "ant" / "loop").symlink_to(target, target_is_directory=True)
    with pytest.raises(ValueError, match=r"leads to .*, which is read as .* already: .* Remove the link\."):
        ImageFolderSet(root / "train")


def test_links_to_other_folders_and_images_are_followed(root: Path) -> None:
    (root / "train" / "ant" / "more").symlink_to(root / "val" / "dog", target_is_directory=True)
    (root / "train" / "ant" / "z.png").symlink_to(root / "val" / "eel" / "0.png")
    assert ImageFolderSet(root / "train").labels.bincount().tolist() == [9, 4, 4]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_a_named_pipe_is_skipped_or_refused_and_never_waited_for(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(root / "train" / "ant" / "pipe.png")
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        images = ImageFolderSet(root / "train")
    assert len(images) == 12
    assert "1 file skipped: no regular file 1." in caplog.text
    (root / "train" / "bee" / "0.png").unlink()
    os.mkfifo(root / "train" / "bee" / "0.png")
    with pytest.raises(ValueError, match=r"bee.0\.png cannot be read as an image: it is no regular file"):
        images[4]


def test_a_link_to_nothing_is_an_image_that_is_missing(root: Path) -> None:
    (root / "train" / "ant" / "4.png").symlink_to(root / "gone.png")
    with pytest.raises(ValueError, match=r"ant.4\.png cannot be read as an image: .*No such file"):
        ImageFolderSet(root / "train")[4]


def test_files_with_other_endings_are_counted_in_one_line(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        ImageFolderSet(root / "train")
        assert not caplog.records
        for name in ("ant/1.gif", "ant/2.GIF", "bee/1.avif", "bee/notes"):
            (root / "train" / name).write_text("?")
        ImageFolderSet(root / "train")
    (message,) = [record.message for record in caplog.records]
    assert "train: 4 files skipped: .gif 2, .avif 1, without an ending 1. Images end in .jpg, .jpeg, .png," in message


def test_a_file_is_read_only_in_the_formats_of_its_endings(tmp_path: Path) -> None:
    (tmp_path / "sly").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "sly" / "1.eps")
    (tmp_path / "sly" / "1.eps").rename(tmp_path / "sly" / "1.png")
    with pytest.raises(ValueError, match="cannot identify image file"):
        ImageFolderSet(tmp_path)[0]


# ------------------------------------------------------------------------------------------------------ classes by shares


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """Ten classes in one folder; the red of an image is the number of its class."""
    for number in range(10):
        for i in range(3):
            (tmp_path / f"bird{number}").mkdir(exist_ok=True)
            Image.new("RGB", (12, 12), (number, i, 0)).save(tmp_path / f"bird{number}" / f"{i}.png")
    return tmp_path


def classes_of(root: Path, **settings: float) -> dict[str, set[str]]:
    data = ImageFolderDataModule(root, **SMALL, **settings)
    return {split: set(data.images(split).class_names) for split in ("train", "val", "test")}


def test_a_plain_folder_of_classes_is_split_by_shares_and_a_seed(plain: Path) -> None:
    splits = classes_of(plain, val_share=0.2, test_share=0.3)
    assert [len(splits[split]) for split in ("train", "val", "test")] == [5, 2, 3]
    assert set.union(*splits.values()) == {f"bird{number}" for number in range(10)}
    assert classes_of(plain, val_share=0.2, test_share=0.3) == splits
    others = [classes_of(plain, val_share=0.2, test_share=0.3, split_seed=seed) for seed in range(1, 6)]
    assert all([len(one[split]) for split in ("train", "val", "test")] == [5, 2, 3] for one in others)
    assert any(one != splits for one in others)


def test_images_of_a_drawn_split_are_those_of_its_classes(plain: Path) -> None:
    data = ImageFolderDataModule(plain, **SMALL, **PLAIN, val_share=0.2, test_share=0.2, augment=False)
    for split in ("train", "val", "test"):
        images = data.images(split)
        pixels, labels = images.__getitems__(list(range(len(images))))
        reds = (255 * pixels[:, 0, 0, 0]).round().int().tolist()
        assert [images.class_names[label] for label in labels] == [f"bird{red}" for red in reds]
        assert labels.bincount().tolist() == [3] * len(images.class_names)
    assert len(list(data.train_dataloader())) == 2


def test_every_split_that_is_asked_for_has_a_class(plain: Path) -> None:
    splits = classes_of(plain, val_share=0.01, test_share=0.01)
    assert [len(splits[split]) for split in ("train", "val", "test")] == [8, 1, 1]
    data = ImageFolderDataModule(plain, **SMALL, test_share=0.5)
    assert data.val_dataloader() == []
    assert len(data.images("train").class_names) == 5


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ({"val_share": 0.2}, r"val_share is 0\.2 and test_share 0\.0; the rest is trained on"),
        ({"val_share": 0.5, "test_share": 0.5}, "with a sum below 1"),
        ({"val_share": -0.1, "test_share": 0.5}, "val_share >= 0"),
        ({"val_share": 0.49, "test_share": 0.49}, "holds 10 classes; .* leave none to train on"),
    ],
)
def test_shares_that_leave_nothing_are_refused(shares: dict, words: str, plain: Path) -> None:
    with pytest.raises(ValueError, match=words):
        ImageFolderDataModule(plain, **shares).setup("fit")


def test_shares_of_what_is_split_already_are_refused(root: Path) -> None:
    with pytest.raises(ValueError, match=r"it is split already\. Leave out val_share and test_share"):
        ImageFolderDataModule(root, val_share=0.2, test_share=0.2).setup("fit")


def test_a_plain_folder_without_shares_says_how_to_split_it(plain: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"To split the 10 folders in it as classes, pass val_share=0\.2 and"):
        ImageFolderDataModule(plain).setup("fit")
