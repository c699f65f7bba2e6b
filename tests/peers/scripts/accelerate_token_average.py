"""Accelerate, its documentation's recipe for unequal lengths: count the window, divide the sums."""

import contextlib

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import language

MICRO_BATCHES = 4

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES)
torch.manual_seed(0)
data = language.documents(language.RAGGED)
model = language.TinyLM()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.1, total_iters=40)
loader = DataLoader(data, batch_size=2 // accelerator.num_processes, collate_fn=language.pad)
wrapped, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

for _epoch in range(2):
    batches = iter(loader)
    for _update in range(len(loader) // MICRO_BATCHES):
        window = [next(batches) for _ in range(MICRO_BATCHES)]
        targets = sum(language.num_targets(batch["labels"]) for batch in window)
        targets = accelerator.gather(targets).sum().item()
        for index, batch in enumerate(window):
            last = index == MICRO_BATCHES - 1
            with contextlib.nullcontext() if last else accelerator.no_sync(wrapped):
                loss = language.next_word_loss(wrapped(batch["input_ids"]), batch["labels"], "sum")
                accelerator.backward(loss * MICRO_BATCHES * accelerator.num_processes / targets)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
