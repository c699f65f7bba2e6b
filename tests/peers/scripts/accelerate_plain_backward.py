"""Accelerate's accumulate with a plain loss.backward(), which does not divide."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import language

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
torch.manual_seed(0)
data = language.documents(language.EQUAL)
model = language.TinyLM()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(data, batch_size=2, collate_fn=language.pad)
wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for _epoch in range(2):
    for batch in loader:
        with accelerator.accumulate(wrapped):
            loss = language.next_word_loss(wrapped(batch["input_ids"]), batch["labels"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
