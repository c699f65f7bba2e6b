"""Accelerate's loop as its documentation has it: accumulate, accelerator.backward, four micro-batches."""

import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import language

lengths = {"equal": language.EQUAL, "ragged": language.RAGGED, "tail": language.EQUAL[:12]}[sys.argv[1]]

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
torch.manual_seed(0)
data = language.documents(lengths)
model = language.TinyLM()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loader = DataLoader(data, batch_size=2, collate_fn=language.pad)
wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for _epoch in range(2):
    for batch in loader:
        with accelerator.accumulate(wrapped):
            loss = language.next_word_loss(wrapped(batch["input_ids"]), batch["labels"])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
