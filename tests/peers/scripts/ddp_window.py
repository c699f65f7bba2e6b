"""DistributedDataParallel, sums over the targets of the whole window, reduced at its last micro-batch.

``undivided`` forgets that the reducer divides by the number of replicas; ``first`` reduces the first
micro-batch in place of the last.
"""

import contextlib
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import language

MICRO_BATCHES = 4
fault = "".join(sys.argv[1:])

dist.init_process_group("gloo")
torch.manual_seed(0)
data = language.documents(language.RAGGED)
model = language.TinyLM()
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loader = DataLoader(
    data, batch_size=1, collate_fn=language.pad, sampler=DistributedSampler(data, shuffle=False)
)
replicas = 1 if fault == "undivided" else dist.get_world_size()
reduced = 0 if fault == "first" else MICRO_BATCHES - 1

for _epoch in range(2):
    batches = list(loader)
    for start in range(0, len(batches), MICRO_BATCHES):
        window = batches[start : start + MICRO_BATCHES]
        targets = sum(language.num_targets(batch["labels"]) for batch in window)
        dist.all_reduce(targets)
        for index, batch in enumerate(window):
            with contextlib.nullcontext() if index == reduced else wrapped.no_sync():
                scores = wrapped(batch["input_ids"])
                loss = language.next_word_loss(scores, batch["labels"], "sum")
                (loss * replicas / targets).backward()
        optimizer.step()
        optimizer.zero_grad()
dist.barrier()
del wrapped
dist.destroy_process_group()
