"""Lightning's manual optimization over windows of four. ``undivided`` forgets to divide by the window."""

import sys

import lightning
import torch
from torch.utils.data import DataLoader

import language

MICRO_BATCHES = 4
divided = sys.argv[1:] != ["undivided"]


class Module(lightning.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.automatic_optimization = False
        self.model = model

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        loss = language.next_word_loss(self.model(batch["input_ids"]), batch["labels"])
        self.manual_backward(loss / MICRO_BATCHES if divided else loss)
        if (index + 1) % MICRO_BATCHES == 0:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


torch.manual_seed(0)
data = language.documents(language.EQUAL)
model = language.TinyLM()
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=1,
    max_epochs=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Module(model), DataLoader(data, batch_size=2, collate_fn=language.pad))
