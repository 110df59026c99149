"""The warning that items may have come to several processes: once for all monitors of a source, with what helps."""

import warnings

import pytest
import torch
from torch.utils.data import DataLoader

from fewshot_callbacks import DiscriminantRatioMonitor, EmbeddingHealthMonitor, KnnMonitor, RetrievalMonitor
from fewshot_callbacks.callbacks import _collection
from tests.callbacks.models import Embeds, Stream, items, loader, messages_of, trainer


@pytest.mark.parametrize("is_stream", [True, False])
def test_monitors_of_one_source_warn_once_and_advise_what_fits_the_data(is_stream, monkeypatch):
    def unknown(collection, side):
        return _collection.Dealing(None, "nobody knows", collection.seen[side.loader])

    monkeypatch.setattr(_collection.Collection, "dealing", unknown)
    monitors = [RetrievalMonitor(source="encoder"), KnnMonitor(1, "self", source="encoder")]
    monitors += [DiscriminantRatioMonitor(source="encoder", every_n_steps=None)]
    monitors += [EmbeddingHealthMonitor(source="encoder", every_n_steps=None, k=2)]
    loaders = DataLoader(Stream(items()), batch_size=11) if is_stream else loader()
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = trainer(*monitors)
        for _ in range(2):
            run.validate(Embeds(), loaders, verbose=False)
    said = messages_of(caught, "items", "loader", 0)
    # In each run one for monitors that heed ids, and one for those that cannot.
    assert len(said) // 2 == len(set(said)) <= 2
    assert all(("use_distributed_sampler" in words) != is_stream for words in said)
    assert all(("get_rank" in words) == is_stream for words in said)
