"""Trainer on a causal language model. An argument chooses the lengths of the documents."""

import sys

from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainingArguments

import language


class InOrder(Trainer):
    def _get_train_sampler(self, *_):
        return SequentialSampler(self.train_dataset)


lengths = {"equal": language.EQUAL, "ragged": language.RAGGED, "tail": language.RAGGED[:10]}[sys.argv[1]]
data = language.documents(lengths)
model = language.tiny_llama()
arguments = TrainingArguments(
    output_dir="out",
    use_cpu=True,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=4,
    num_train_epochs=2,
    learning_rate=0.5,
    optim="sgd",
    report_to="none",
    save_strategy="no",
    logging_steps=1,
    disable_tqdm=True,
)
trainer = InOrder(model=model, args=arguments, train_dataset=data, data_collator=language.pad)
trainer.train()
