"""DeepSpeed's loop, four micro-batches an update: the stage of ZeRO, then the lengths or ``twice``.

``twice`` divides by the micro-batches of the window, which the engine's backward does as well.
"""

import sys

import deepspeed
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import language

MICRO_BATCHES = 4
stage, variant = int(sys.argv[1]), sys.argv[2]

deepspeed.init_distributed("gloo")
torch.manual_seed(0)
data = language.documents(language.RAGGED if variant == "ragged" else language.EQUAL)
model = language.TinyLM()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
replicas = torch.distributed.get_world_size()
engine, _, _, _ = deepspeed.initialize(
    model=model,
    optimizer=optimizer,
    config={
        "train_micro_batch_size_per_gpu": 2 // replicas,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    },
)
loader = DataLoader(
    data, batch_size=2 // replicas, collate_fn=language.pad, sampler=DistributedSampler(data, shuffle=False)
)

for _epoch in range(2):
    for batch in loader:
        loss = language.next_word_loss(engine(batch["input_ids"]), batch["labels"])
        engine.backward(loss / MICRO_BATCHES if variant == "twice" else loss)
        engine.step()
