"""Transformers' Trainer, which owns its loop, made to take turns with the others.

``Trainer.train()`` runs once, on a thread of its own, and asks an iterator for micro-batches. The iterator
waits until it is this contestant's turn, hands out the micro-batches of one update, and the turn ends
when the Trainer asks for the first micro-batch of the next. So a turn holds everything that the Trainer
does for an update, after its step too, and no start or end of ``train()``. Given samples instead, it reads
and collates them inside its turn, with its own loader. What measures the turn is entered and left by the
iterator, on the Trainer's thread, so the hand-over is not measured.
"""

from __future__ import annotations

import queue
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from work import CLIP_GRAD_NORM, LEARNING_RATE, MicroBatch, Work, new_model, new_optimizer, sum_loss

_LONGEST_TURN_S = 600.0


class _LeaveTrainingError(Exception):
    """Raised by the iterator to leave ``train()``."""


class _CausalLM(nn.Module):
    """The GPT with a forward as the Trainer wants it: labels in, loss out, divided by its N."""

    accepts_loss_kwargs = True
    loss_type = "ForCausalLM"  # by this the Trainer knows that labels are shifted, and counts so

    def __init__(self, gpt: nn.Module) -> None:
        super().__init__()
        self.gpt = gpt

    def forward(
        self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Tensor | None = None
    ) -> dict[str, Tensor]:
        logits = self.gpt(input_ids)
        assert num_items_in_batch is not None, "the Trainer did not count the items"
        return {"loss": sum_loss(logits, labels) / num_items_in_batch, "logits": logits}


class _Trainer(transformers.Trainer):
    """The Trainer, given its micro-batches by turns."""

    turns: Iterator[MicroBatch]

    def get_train_dataloader(self) -> Any:
        return self.turns

    def own_micro_batches(self) -> Iterator[MicroBatch]:
        """Those that its own sampler and loader make of its data set."""
        return iter(super().get_train_dataloader())

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        sampler = super()._get_train_sampler(train_dataset)
        if hasattr(sampler, "num_global_batches"):  # batch_rebalance: in the order of the data set
            sampler.shuffle = False
        return sampler


class TrainerTurns:
    """A ``Trainer.train()`` that runs one update at a time.

    Args:
        work: the sizes.
        samples: what its own loader reads, which then makes the micro-batches, and a turn is as many of
            them as an update has; None to be handed micro-batches ready made.
        collate: makes a micro-batch of a list of those.
        strategy: its ``train_sampling_strategy``: what order its own loader reads them in.
    """

    def __init__(
        self,
        work: Work,
        *,
        samples: Any = None,
        collate: Callable[[list[Any]], MicroBatch] | None = None,
        strategy: str = "sequential",
    ) -> None:
        transformers.logging.set_verbosity_error()
        self._micro_batches_per_window = work.micro_batches_per_window
        self.gpt = new_model(work)
        self.optimizer = new_optimizer(self.gpt)
        self._folder = tempfile.TemporaryDirectory()
        arguments = transformers.TrainingArguments(
            output_dir=self._folder.name,
            per_device_train_batch_size=work.micro_batch_samples,
            gradient_accumulation_steps=work.micro_batches_per_window,
            max_steps=10**9,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            max_grad_norm=CLIP_GRAD_NORM,
            use_cpu=True,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            ddp_find_unused_parameters=False,  # faster than its default, and what the others have
            train_sampling_strategy=strategy,
            remove_unused_columns=False,
            dataloader_drop_last=True,
            dataloader_pin_memory=False,
        )
        unread = torch.utils.data.TensorDataset(torch.zeros(1))
        trainer = _Trainer(
            model=_CausalLM(self.gpt),
            args=arguments,
            train_dataset=unread if samples is None else samples,
            data_collator=collate,
            optimizers=(self.optimizer, None),
        )
        self._own = None if samples is None else trainer.own_micro_batches
        trainer.turns = self._turns()
        self._given: queue.Queue[tuple[list[MicroBatch], AbstractContextManager[Any]] | None] = (
            queue.Queue()
        )
        self._ended: queue.Queue[BaseException | None] = queue.Queue()
        self._thread = threading.Thread(target=self._train, args=(trainer,), daemon=True)
        self._thread.start()
        self._wait()  # until it asks for its first micro-batch: DDP is built by then

    def run(self, batches: list[Any], around: AbstractContextManager[Any]) -> None:
        """One update, inside ``around``; of ``batches``, unless the Trainer makes its own.

        Raises:
            ValueError: not as many micro-batches as an update of the Trainer has.
        """
        if self._own is None and len(batches) != self._micro_batches_per_window:
            raise ValueError(
                f"the Trainer was set to {self._micro_batches_per_window} micro-batches an update and "
                f"cannot run one of {len(batches)}"
            )
        self._given.put((batches, around))
        self._wait()

    def close(self) -> None:
        """Leave ``train()``."""
        self._given.put(None)
        self._thread.join(_LONGEST_TURN_S)
        self._folder.cleanup()

    def _wait(self) -> None:
        error = self._ended.get(timeout=_LONGEST_TURN_S)
        if error is not None:
            raise error

    def _turns(self) -> Iterator[MicroBatch]:
        own = None if self._own is None else self._own()
        while True:
            self._ended.put(None)
            given = self._given.get()
            if given is None:
                raise _LeaveTrainingError
            batches, around = given
            with around:
                yield from batches if own is None else islice(own, self._micro_batches_per_window)

    def _train(self, trainer: transformers.Trainer) -> None:
        torch.set_num_threads(1)
        try:
            trainer.train()
        except _LeaveTrainingError:
            pass
        except BaseException as error:  # raised again where the turn is waited for
            self._ended.put(error)
