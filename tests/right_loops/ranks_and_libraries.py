"""Two ranks, and frameworks."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

from broken_loops.shared import classifier, image_loader


def ddp_unequal_counts(rank: int, ranks: int) -> nn.Module:
    """4 micro-batches on one rank and 3 on the other, and weights that come out right."""
    model = DDP(classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = iter(image_loader(rank=rank, ranks=ranks))
    mine = (4, 3)[rank]
    for _ in range(3):
        window = [next(loader) for _ in range(mine)]
        total = torch.tensor(sum(len(x) for x, _ in window))
        dist.all_reduce(total)
        for i, (x, y) in enumerate(window):
            model.require_backward_grad_sync = i == mine - 1
            (F.cross_entropy(model(x), y, reduction="sum") * ranks / total).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def fsdp(rank: int, ranks: int) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = classifier()
    fully_shard(model.body)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(image_loader(rank=rank, ranks=ranks)):
        model.set_requires_gradient_sync((i + 1) % 4 == 0)
        (F.cross_entropy(model(x), y) / 4).backward()
        if (i + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def fabric() -> nn.Module:
    from lightning.fabric import Fabric

    runner = Fabric(accelerator="cpu", devices=1)
    net = classifier()
    model, optimizer = runner.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for i, (x, y) in enumerate(image_loader()):
        with runner.no_backward_sync(model, enabled=(i + 1) % 4 != 0):
            runner.backward(F.cross_entropy(model(x), y) / 4)
        if (i + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return net


def lightning() -> nn.Module:
    """Automatic optimization; the last backward of a window runs inside the step."""
    import lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = classifier()

        def training_step(self, batch, batch_index):  # noqa: ARG002
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.net.parameters(), lr=0.1)

    warnings.simplefilter("ignore")
    module = Module()
    pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        accumulate_grad_batches=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, image_loader())
    return module.net


def trainer() -> nn.Module:
    """The newest Trainer on a causal LM with ragged sequences."""
    import tempfile

    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from broken_loops.shared import IGNORED, texts

    def collate(sequences):
        pad = nn.utils.rnn.pad_sequence
        return {
            "input_ids": pad(sequences, batch_first=True),
            "labels": pad(sequences, batch_first=True, padding_value=IGNORED),
        }

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=20, **sizes))
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=4,
            max_grad_norm=0.0,
            max_steps=3,
            optim="sgd",
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
            train_sampling_strategy="sequential",
        )
        Trainer(model=model, args=arguments, train_dataset=texts(), data_collator=collate).train()
    return model
