"""Trainer with a loss of one's own, a mean that leaves num_items_in_batch aside."""

from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainingArguments

import language


class OwnLoss(Trainer):
    def _get_train_sampler(self, *_):
        return SequentialSampler(self.train_dataset)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):  # noqa: ARG002
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = language.next_word_loss(outputs.logits, labels)
        return (loss, outputs) if return_outputs else loss


data = language.documents(language.EQUAL)
model = language.tiny_llama()
arguments = TrainingArguments(
    output_dir="out",
    use_cpu=True,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=4,
    num_train_epochs=2,
    learning_rate=0.1,
    optim="sgd",
    report_to="none",
    save_strategy="no",
    logging_steps=1,
    disable_tqdm=True,
)
trainer = OwnLoss(model=model, args=arguments, train_dataset=data, data_collator=language.pad)
trainer.train()
