"""Trainer on a classifier whose passes end with a window of one micro-batch of four."""

from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainingArguments, default_data_collator

import language


class InOrder(Trainer):
    def _get_train_sampler(self, *_):
        return SequentialSampler(self.train_dataset)


data = language.labelled(10)
model = language.tiny_bert()
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
trainer = InOrder(model=model, args=arguments, train_dataset=data, data_collator=default_data_collator)
trainer.train()
