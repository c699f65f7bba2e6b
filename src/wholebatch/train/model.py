"""The built-in GPT, by the name it had before there were other models."""

from __future__ import annotations

from wholebatch.train.models.gpt import GPT as GPT
from wholebatch.train.models.gpt import Attention as Attention
from wholebatch.train.models.gpt import Block as Block
from wholebatch.train.models.gpt import GPTShape as GPTShape
from wholebatch.train.models.gpt import decayed_apart as decayed_apart
from wholebatch.train.models.gpt import num_parameters as num_parameters
