"""Fabric on its ranks, four micro-batches an update.

``scope`` has only the backward under no_backward_sync.
"""

import os
import sys

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

import language

MICRO_BATCHES = 4
forward_inside = sys.argv[1:] != ["scope"]

fabric = Fabric(accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", "1")), strategy="ddp")
fabric.launch()
torch.manual_seed(0)
data = language.documents(language.EQUAL)
model = language.TinyLM()
wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.5))
loader = fabric.setup_dataloaders(DataLoader(data, batch_size=1, collate_fn=language.pad))

for _epoch in range(2):
    for index, batch in enumerate(loader):
        accumulating = (index + 1) % MICRO_BATCHES != 0
        if forward_inside:
            with fabric.no_backward_sync(wrapped, enabled=accumulating):
                loss = language.next_word_loss(wrapped(batch["input_ids"]), batch["labels"])
                fabric.backward(loss / MICRO_BATCHES)
        else:
            loss = language.next_word_loss(wrapped(batch["input_ids"]), batch["labels"])
            with fabric.no_backward_sync(wrapped, enabled=accumulating):
                fabric.backward(loss / MICRO_BATCHES)
        if not accumulating:
            optimizer.step()
            optimizer.zero_grad()
