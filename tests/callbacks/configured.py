"""What the configuration files of `test_configuration_files` name by their import path."""

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset


def points(count):
    labels = torch.arange(count) % 4
    generator = torch.Generator().manual_seed(count)
    return torch.eye(4)[labels].repeat(1, 2) + 0.4 * torch.randn(count, 8, generator=generator), labels


class Own(Dataset):
    """A data set of a class of one's own, with an argument."""

    def __init__(self, count: int = 24):
        self.count = count
        self.inputs, self.labels = points(count)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.inputs[index], int(self.labels[index])


class OwnTensors(TensorDataset):
    def __init__(self, count: int):
        super().__init__(*points(count))
        self.labels = self.tensors[1]


class OwnLoader(DataLoader):
    def __init__(self, count: int, batch_size: int = 5):
        super().__init__(Own(count), batch_size=batch_size)


class OwnTable:
    """Rows that are mappings, as a data set of Hugging Face has them."""

    column_names = ("inputs", "label")

    def __init__(self, count: int):
        self.data = Own(count)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, key):
        if isinstance(key, str):
            return self.data.labels.tolist()
        inputs, label = self.data[key]
        return {"inputs": inputs, "label": label}


class BankOfTrainer:
    """A function of the Trainer with an argument."""

    def __init__(self, count: int):
        self.count = count

    def __call__(self, trainer):
        return Own(self.count)


def bank_of_24(trainer):
    return Own(24)


def made(count: int) -> Dataset:
    return Own(count)


class FromBatch:
    """A function of (outputs, batch)."""

    def __call__(self, outputs, batch):
        return batch[1]


class Labels:
    """A function of a batch of the set, or of a table."""

    def __call__(self, batch):
        return batch["label"] if isinstance(batch, dict) else batch[1]


class Embedded:
    """A source that is a function of (outputs, batch)."""

    def __call__(self, outputs, batch):
        return outputs["embeddings"], outputs["labels"]


class Model(LightningModule):
    def __init__(self, dim: int = 6):
        super().__init__()
        self.encoder, self.head = nn.Linear(8, dim), nn.Linear(dim, 4)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.head(self.encoder(batch[0])), batch[1])

    def validation_step(self, batch, batch_idx):
        embeddings = self.encoder(batch[0])
        return {"embeddings": embeddings, "labels": batch[1], "other": embeddings + 1, "item": batch[2]}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Data(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(*points(40)), batch_size=10)

    def val_dataloader(self):
        return DataLoader(TensorDataset(*points(40), torch.arange(40)), batch_size=10)

    def training_data_for_evaluation(self):
        return Own(24)
