"""A LightningModule for any backbone and any loss of (embeddings, labels), also for batches larger than memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.checkpoint import checkpoint
from torchmetrics.utilities.distributed import gather_all_tensors

from fewshot_callbacks.distributed.torch_distributed import all_processes, process_count
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional import evaluate_retrieval
from fewshot_callbacks.functional._labels import Labels, as_labels, encode, refuse_other_forms
from fewshot_callbacks.losses import SoftAveragePrecisionLoss
from fewshot_callbacks.protonet.backbones import checked_embeddings, make_backbone
from fewshot_callbacks.system.words import counted, with_article
from fewshot_callbacks.trainer.lightning import LightningModule
from fewshot_callbacks.trainer.warning import warn_of_other_package

# Entries of a checkpoint: the string labels in the order of their numbers, and whether labels are strings or numbers.
WORDS_ENTRY = "words_of_labels"
FORM_ENTRY = "form_of_labels"


def embed_in_pieces(
    embed: Callable[[Tensor], Tensor], images: Shaped[Tensor, "images *shape"], size: int, module: nn.Module
) -> Float[Tensor, "images dim"]:
    """Return the embeddings of a batch; the graph of only one piece at a time is in memory.

    Each piece is embedded without a graph. The backward pass embeds it again with a graph, once the gradient with
    respect to its embeddings is known. Random state and autocast are the same both times. The second pass does not
    change buffers, such as those of batch norm. A piece has at most `size` images. `module` has the buffers that
    `embed` may change.

    References:
        Revaud, Almazan, Rezende, de Souza, "Learning with Average Precision: Training Image Retrieval with a Listwise
        Loss", ICCV 2019; Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016.

    Examples:
        >>> layer = nn.Linear(3, 2)
        >>> images = torch.randn(5, 3)
        >>> embed_in_pieces(layer, images, 2, layer).sum().backward()
        >>> torch.allclose(layer.weight.grad[0], images.sum(dim=0))
        True
    """
    # The pieces have nearly the same size, because batch norm fails on a last piece with one image.
    pieces = images.tensor_split(math.ceil(len(images) / size))
    if not torch.is_grad_enabled():
        return torch.cat([embed(piece) for piece in pieces])

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), _buffers_left_alone(module)

    return torch.cat([checkpoint(embed, piece, use_reentrant=False, context_fn=contexts) for piece in pieces])


@contextmanager
def _buffers_left_alone(module: nn.Module) -> Iterator[None]:
    """Return a context in which the module uses copies of its buffers."""
    originals = [
        (submodule, name, buffer)
        for submodule in module.modules()
        for name, buffer in submodule.named_buffers(recurse=False, remove_duplicate=False)
    ]
    try:
        for submodule, name, buffer in originals:
            setattr(submodule, name, buffer.clone())
        yield
    finally:
        for submodule, name, buffer in originals:
            setattr(submodule, name, buffer)


def of_all_processes(
    local_rows: Shaped[Tensor, "items *rest"], group: Any | None = None
) -> Shaped[Tensor, "all_items *rest"]:
    """Return the rows of all processes, in rank order and with a gradient. *Collective*.

    Processes may have different numbers of rows. The gradient of a row is the sum of its gradients in all processes.
    DistributedDataParallel averages the weights' gradients over processes, which gives the gradient of the mean loss.
    If all processes compute the same loss of all rows, this equals the gradient of a single process. `group` has the
    processes with different rows; by default all processes.

    Examples:
        >>> of_all_processes(torch.tensor([[1.0], [2.0]])).tolist()
        [[1.0], [2.0]]
    """
    if process_count() == 1:
        return local_rows
    all_rows: Tensor = _Gathered.apply(local_rows, group)
    return all_rows


class _Gathered(torch.autograd.Function):
    """Gathers rows with a gradient, unlike `torch.distributed.nn.functional.all_gather` also different numbers of rows."""

    @staticmethod
    def forward(ctx: Any, local_rows: Tensor, group: Any | None) -> Tensor:
        rows_of_processes = gather_all_tensors(local_rows.detach(), group)
        rank = torch.distributed.get_rank(group)
        ctx.group = group
        first_row = sum(len(rows) for rows in rows_of_processes[:rank])
        ctx.rows = slice(first_row, first_row + len(local_rows))
        return torch.cat(rows_of_processes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # The sum is written into a contiguous copy, because other functions may read the gradient.
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=ctx.group)
        return total[ctx.rows], None


class EmbeddingModule(LightningModule):
    """LightningModule that trains any backbone with any loss of a batch of embeddings.

    The loss is computed on the joint batch of all processes. With DDP, embeddings and labels are gathered with
    gradients, so a step equals a single-process step on the joint batch. Optimisation is automatic: precision, gradient
    clipping, `accumulate_grad_batches` and schedulers work as in any module.

    It logs `train/loss`. With `SoftAveragePrecisionLoss` it also logs `train/soft_AP` (one minus the loss) and, every
    `ap_every_n_steps` steps, `train/batch_AP`: the exact mean average precision of the same batch. Loggers receive
    `train/batch_AP` only on these steps, regardless of the Trainer's `log_every_n_steps`. Steps return `embeddings` and
    `labels`, so the monitors need no `source`.

    Labels are a tensor, which is passed to the loss unchanged, or a list of strings. Each string gets a number. It
    keeps this number in all batches and processes, and in a run that you resume from a checkpoint. Strings and numbers
    cannot be mixed, because the number of a string could be the label of another class. Several processes compare the
    type of their labels once, in the first step.

    Args:
        backbone: Network from images to embeddings: `"conv4"`, `"resnet18"`, or any module that returns (images, dim).
        loss: Function or module called as `loss(embeddings, labels)`; it returns a scalar. Its parameters are trained too.
        in_channels: Channels of the images, for a backbone given by name.
        micro_batch: Largest number of images per forward pass in training; None embeds the whole batch at once. A
            larger batch is embedded in pieces of nearly equal size. This needs the memory of one piece's activations,
            and the time of one additional forward pass. The gradients are the gradients of the whole batch, with two
            exceptions. Batch norm normalises each piece separately, and updates its running statistics once per piece.
            A layer that changes a buffer on which its output depends, such as spectral norm, has slightly different
            gradients, because each piece runs twice. The memory of the loss does not change: the loss gets the whole
            batch of all processes.
        ap_every_n_steps: Log `train/batch_AP` every this many steps; 0 for never.
        learning_rate: Learning rate of Adam, positive.
        optimizer: Function from the parameters to an optimiser, instead of Adam.
        scheduler: Function from the optimiser to a learning-rate scheduler that steps once per epoch; by default none.

    Raises:
        ValueError: A setting is out of range. Training raises it if `micro_batch` is larger than the first batch, the
            backbone does not return (images, dim), the loss does not return a scalar, or strings and numbers are mixed
            as labels.

    Note: If you pass a backbone or loss as a module, the checkpoint contains its weights but not its construction: pass it
    again to `load_from_checkpoint`. If LightningCLI configures it (`class_path`), it is rebuilt automatically.

    References:
        Revaud, Almazan, Rezende, de Souza, "Learning with Average Precision: Training Image Retrieval with a Listwise Loss",
        ICCV 2019.

    Examples:
        >>> model = EmbeddingModule("conv4", SoftAveragePrecisionLoss(), in_channels=1, micro_batch=64)
        >>> model(torch.zeros(2, 1, 32, 32)).shape
        torch.Size([2, 256])
    """

    def __init__(
        self,
        backbone: Literal["conv4", "resnet18"] | nn.Module,
        loss: nn.Module | Callable[..., Tensor],
        *,
        in_channels: int = 3,
        micro_batch: int | None = None,
        ap_every_n_steps: int = 50,
        learning_rate: float = 1e-3,
        optimizer: Callable[[Iterable[Any]], Optimizer] | None = None,
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
    ) -> None:
        super().__init__()
        warn_of_other_package("EmbeddingModule")
        if micro_batch is not None and micro_batch < 1:
            raise InputError(
                f"EmbeddingModule(micro_batch={micro_batch}): a piece needs at least one image. Use at least 1, or None."
            )
        if ap_every_n_steps < 0:
            raise InputError(
                f"EmbeddingModule(ap_every_n_steps={ap_every_n_steps}) is negative. Use at least 1, or 0 for never."
            )
        if not 0 < learning_rate < math.inf:
            raise InputError(
                f"EmbeddingModule(learning_rate={learning_rate}): Adam needs a positive learning rate. Use a number such as "
                "1e-3."
            )
        if not callable(loss):
            raise InputError(
                f"EmbeddingModule: the loss {loss!r} is not callable. Pass a function loss(embeddings, labels) -> scalar."
            )
        self.save_hyperparameters(ignore=["backbone", "loss", "optimizer", "scheduler"])
        if "_instantiator" in self.hparams:  # LightningCLI passes the configuration of modules, which can be saved
            self.save_hyperparameters()
        self.backbone = make_backbone(backbone, in_channels)
        self.loss = loss
        # string label -> its number, in order of appearance
        self._number_of_word: dict[str, int] = {}
        # "strings" or "numbers", the same in all processes after the first batch
        self._form_of_labels: str | None = None
        self.micro_batch = micro_batch
        self.ap_every_n_steps = ap_every_n_steps
        self.learning_rate = learning_rate
        self.optimizer = optimizer
        self.scheduler = scheduler

    def forward(self, images: Shaped[Tensor, "images *shape"]) -> Float[Tensor, "images dim"]:
        """Return the embeddings of images, in training mode computed in pieces of `micro_batch`.

        Args:
            images: A batch of inputs of the backbone.

        Raises:
            ValueError: The backbone does not return (images, dim).
        """
        if not self.training or self.micro_batch is None or self.micro_batch >= len(images):
            return self._embed(images)
        return embed_in_pieces(self._embed, images, self.micro_batch, self.backbone)

    def training_step(self, batch: Sequence[Any], batch_idx: int) -> dict[str, Any]:
        """Return the `loss` of the joint batch of all processes, and this process's `embeddings` and `labels`.

        Callbacks read the embeddings, which are detached.

        Args:
            batch: Images and labels.
            batch_idx: Position of the batch in its epoch.

        Raises:
            ValueError: `micro_batch` is larger than the first batch of an epoch, or the loss is not a scalar.
        """
        images, labels = batch
        if batch_idx == 0 and self.micro_batch is not None and self.micro_batch > len(images):
            raise InputError(
                f"EmbeddingModule(micro_batch={self.micro_batch}) is larger than the batch, which has "
                f"{counted(len(images), 'image')}. Use micro_batch <= {len(images)}, micro_batch=None, or larger batches."
            )
        embeddings = self(images)
        # The loss needs the whole batch: the mean of its values on parts of the batch would be a different loss.
        group = self._data_parallel_group()
        all_embeddings = of_all_processes(embeddings, group)
        all_labels = of_all_processes(self._targets(labels), group)
        loss = self._checked(self.loss(all_embeddings, all_labels))
        self.log("train/loss", loss, prog_bar=True, batch_size=len(all_embeddings))
        if isinstance(self.loss, SoftAveragePrecisionLoss):
            self._log_average_precision(self.loss, loss.detach(), all_embeddings.detach(), all_labels)
        return {"loss": loss, "embeddings": embeddings.detach(), "labels": labels}

    def validation_step(self, batch: Sequence[Any], batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        """Return the `embeddings` and `labels` of a batch, for callbacks.

        Args:
            batch: Images and labels.
            batch_idx: Not used.
            dataloader_idx: Not used.
        """
        images, labels = batch
        return {"embeddings": self(images), "labels": labels}

    test_step = predict_step = validation_step

    def configure_optimizers(self) -> Any:
        """Return the optimiser of the parameters of backbone and loss, with the scheduler if there is one."""
        if self.optimizer is None:
            optimizer: Optimizer = torch.optim.Adam(self.parameters(), lr=self.learning_rate)
        else:
            optimizer = self.optimizer(self.parameters())
        return optimizer if self.scheduler is None else ([optimizer], [self.scheduler(optimizer)])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the numbers of string labels, so that a resumed run uses the same numbers."""
        checkpoint[WORDS_ENTRY] = list(self._number_of_word)
        checkpoint[FORM_ENTRY] = self._form_of_labels

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load the numbers of string labels; a checkpoint of another module class contains none."""
        self._number_of_word = {word: number for number, word in enumerate(checkpoint.get(WORDS_ENTRY, ()))}
        self._form_of_labels = checkpoint.get(FORM_ENTRY)

    def _data_parallel_group(self) -> Any | None:
        """Return the group of processes that have different items; None if all processes have different items."""
        # The processes of a tensor-parallel group have the same items, and the loss must not see these items twice.
        mesh = getattr(self.trainer.strategy, "device_mesh", None)
        return None if mesh is None else mesh["data_parallel"].get_group()

    def _embed(self, images: Tensor) -> Tensor:
        return checked_embeddings(self.backbone(images), self.backbone, len(images), "EmbeddingModule")

    def _targets(self, labels: Any) -> Tensor:
        """Return the labels for the loss: tensors unchanged, and a number for each string.

        *Collective* for strings, and in the first step.

        A string keeps its number in all batches, processes and resumed runs, because a loss may remember earlier
        batches. New strings are numbered alphabetically.
        """
        read = labels if isinstance(labels, Tensor) else as_labels(labels, "labels", "EmbeddingModule")
        self._refuse_another_form(read)
        if self._form_of_labels != "strings":
            return read if isinstance(read, Tensor) else read.codes.to(self.device)
        [codes], words = encode(
            "EmbeddingModule", {"labels": as_labels(read, "labels", "EmbeddingModule")}, all_processes()
        )
        if words is None:  # no process has an item
            return codes.to(self.device)
        numbers = [self._number_of_word.setdefault(word, len(self._number_of_word)) for word in words]
        return torch.tensor(numbers, device=self.device)[codes.to(self.device)]

    def _refuse_another_form(self, labels: Tensor | Labels) -> None:
        """Raise an error if some batches or processes have string labels and others numbers.

        *Collective* until a process has had labels.

        Only the first batches are compared. A later batch of another form is an error in its process only.
        """
        form = _form_of(labels)
        if self._form_of_labels is None:
            forms = all_processes().gather(form)
            form_of_process = {f"labels in process {rank}": form for rank, form in enumerate(forms) if form is not None}
            refuse_other_forms("EmbeddingModule", form_of_process, "labels")
            self._form_of_labels = next(iter(form_of_process.values()), None)
        elif form is not None:
            form_of_batches = {"labels of earlier batches": self._form_of_labels, "labels of this batch": form}
            refuse_other_forms("EmbeddingModule", form_of_batches, "labels")

    def _checked(self, loss: Any) -> Tensor:
        """Return the loss; raise an error if it is not a scalar."""
        if isinstance(loss, Tensor) and loss.ndim == 0:
            return loss
        name = getattr(self.loss, "__name__", type(self.loss).__name__)
        returned = (
            f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else with_article(type(loss).__name__)
        )
        raise InputError(
            f"EmbeddingModule: {name} returned {returned}, but a loss must be a scalar. Pass a loss that returns a scalar, "
            "for instance the mean over items."
        )

    def _log_average_precision(
        self, criterion: SoftAveragePrecisionLoss, loss: Tensor, embeddings: Tensor, labels: Tensor
    ) -> None:
        if len(labels.unique()) == len(labels):
            return  # no two items share a label, so average precision is undefined (the loss has on_empty="zero")
        self.log("train/soft_AP", 1 - loss, batch_size=len(labels))
        # number of the current batch over all epochs, from 1, as Lightning counts for `log_every_n_steps`
        batch = self.trainer.fit_loop.epoch_loop.total_batch_idx + 1
        if self.ap_every_n_steps and batch % self.ap_every_n_steps == 0:
            is_hamming = criterion.similarity == "hamming"
            report = evaluate_retrieval(
                # The same threshold as `BinaryCodes` in evaluation, where 0 becomes 1.
                embeddings >= 0 if is_hamming else embeddings,
                labels,
                similarity="hamming"
                if is_hamming
                else "cosine",  # Euclidean distances on the unit sphere give the same ranking
                metrics=("mAP", "recall@1"),
            )
            self.log("train/batch_AP", report.mAP, batch_size=len(labels), logger=False)
            for logger in self.loggers:  # `log` would repeat the value on every step until the next value
                logger.log_metrics({"train/batch_AP": report.mAP}, step=self.global_step)


def _form_of(labels: Tensor | Labels) -> str | None:
    """Return the form of labels, "strings" or "numbers"; None if there are no items, because both forms fit."""
    if isinstance(labels, Tensor):
        return "numbers" if labels.numel() else None
    if not len(labels):
        return None
    return "strings" if labels.form == "strings" else "numbers"
