"""A training loop as many people write it, wrong on purpose: what does an audit say of it?

    wholebatch audit examples/audit_mean_of_means.py

It knows nothing of Wholebatch. Each micro-batch's loss is a mean over its own tokens, and the means are
averaged.
"""

import torch
import torch.nn.functional as F

ACCUMULATE = 4

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(50, 16), torch.nn.Linear(16, 50))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
texts = [torch.randint(50, (2, length)) for length in (4, 30, 12, 40) * 4]  # micro-batches of two samples

for i, tokens in enumerate(texts):
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    (loss / ACCUMULATE).backward()
    if (i + 1) % ACCUMULATE == 0:
        optimizer.step()
        optimizer.zero_grad()
