"""Lightning's automatic optimization with accumulate_grad_batches=4."""

import sys

import lightning
import torch
from torch.utils.data import DataLoader

import language

lengths = {"equal": language.EQUAL, "ragged": language.RAGGED, "tail": language.EQUAL[:12]}[sys.argv[1]]


class Module(lightning.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, _index):
        loss = language.next_word_loss(self.model(batch["input_ids"]), batch["labels"])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


torch.manual_seed(0)
data = language.documents(lengths)
model = language.TinyLM()
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=1,
    max_epochs=2,
    accumulate_grad_batches=4,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Module(model), DataLoader(data, batch_size=2, collate_fn=language.pad))
