"""DistributedDataParallel as in every tutorial: a mean on each replica, averaged by the reducer."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import language

dist.init_process_group("gloo")
torch.manual_seed(0)
# One replica gets the even ones, the other the odd ones.
data = language.documents([3, 12, 4, 20, 24, 5, 18, 6, 4, 11, 3, 16, 9, 14, 4, 20])
model = language.TinyLM()
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loader = DataLoader(
    data, batch_size=2, collate_fn=language.pad, sampler=DistributedSampler(data, shuffle=False)
)

for _epoch in range(2):
    for batch in loader:
        optimizer.zero_grad()
        language.next_word_loss(wrapped(batch["input_ids"]), batch["labels"]).backward()
        optimizer.step()
dist.barrier()
del wrapped
dist.destroy_process_group()
