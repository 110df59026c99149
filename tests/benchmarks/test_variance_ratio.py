"""The two columns of the cost of a batch: the compiled loop, and PyTorch's operations without it."""

import torch

from fewshot_callbacks.functional import _scatter_kernel
from tests.scripts import imported_script


def test_the_column_of_pytorch_calls_no_compiled_kernel(monkeypatch):
    calls = []
    kernel = _scatter_kernel.ratios

    def counted(*arguments):
        calls.append(arguments)
        return kernel(*arguments)

    monkeypatch.setattr(_scatter_kernel, "ratios", counted)
    embeddings = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(20) % 5
    with imported_script("benchmarks/variance_ratio.py") as benchmark:
        by_pytorch = benchmark.by_pytorch(embeddings, labels)
        assert len(calls) == 0
        compiled = benchmark.batch_ratios(embeddings, labels)
        assert len(calls) == 1
    torch.testing.assert_close(by_pytorch, compiled)
