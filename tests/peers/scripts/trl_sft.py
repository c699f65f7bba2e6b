"""SFTTrainer on documents of unequal lengths that are words already."""

from datasets import Dataset
from tokenizers import Tokenizer, models
from torch.utils.data import SequentialSampler
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import language


class InOrder(SFTTrainer):
    def _get_train_sampler(self, *_):
        return SequentialSampler(self.train_dataset)


names = {f"w{index}": index for index in range(language.WORDS)}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(names, unk_token="w0")), pad_token="w0", eos_token="w1"
)
data = language.documents(language.RAGGED)
model = language.tiny_llama()
arguments = SFTConfig(
    output_dir="out",
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
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
dataset = Dataset.from_list([{"input_ids": sample["input_ids"].tolist()} for sample in data])
trainer = InOrder(model=model, args=arguments, train_dataset=dataset, processing_class=tokenizer)
trainer.train()
