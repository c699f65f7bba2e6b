"""Text to token ids: the bytes themselves, or a Hugging Face tokenizer from a local folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wholebatch.errors import UsageError
from wholebatch.extras import needed

# Ids of the bytes tokenizer beside the 256 bytes. A model gets those that occur.
BEGIN = 256  # before the first byte, so that every byte is predicted from something
END = 257  # after a completion: it is learned, so that the model can tell when to stop
MASK = 258  # in place of a byte that is to be found


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokenizer:
    """How texts become token ids.

    Args:
        name: "bytes", or the folder.
        encode: ids of each of some texts, without marks.
        begin: ids before the tokens of every sample.
        end: ids after the tokens of a whole text.
        completion_end: ids after a completion.
        mask_id: of the token that hides another one, or None.
        padding_id: what fills the end of a shorter sample.
        vocabulary: ids that a model must know, 0 to vocabulary - 1.
        special_ids: ids that are never hidden, and never put in the place of another.
        masks_padding: True where models expect an attention mask beside the ids.
    """

    name: str
    encode: Callable[[Sequence[str]], Sequence[Sequence[int]]]
    begin: tuple[int, ...]
    end: tuple[int, ...]
    completion_end: tuple[int, ...]
    mask_id: int | None
    padding_id: int
    vocabulary: int
    special_ids: frozenset[int]
    masks_padding: bool


def bytes_tokenizer(*, completions: bool, masked: bool) -> Tokenizer:
    """A token for each byte of the UTF-8 text, with a begin mark before it.

    Args:
        completions: the samples end with END.
        masked: the samples hold MASK.
    """
    vocabulary = MASK + 1 if masked else END + 1 if completions else BEGIN + 1
    return Tokenizer(
        name="bytes",
        encode=lambda texts: [text.encode() for text in texts],
        begin=(BEGIN,),
        end=(),
        completion_end=(END,),
        mask_id=MASK,
        padding_id=0,
        vocabulary=vocabulary,
        special_ids=frozenset((BEGIN, END, MASK)),
        masks_padding=False,
    )


def folder_tokenizer(folder: str) -> Tokenizer:
    """The Hugging Face tokenizer of a local folder; the network is never asked, no code there is run.

    Begin and end marks are those that the tokenizer puts around a text itself. A completion ends with
    the same, or where there are none with the end-of-sequence token.

    Args:
        folder: as ``save_pretrained`` writes it.

    Raises:
        UsageError: no such folder, no tokenizer in it, or the extra ``hf`` is not installed.
    """
    loaded = _load(folder)

    def encode(texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        # Not verbose: longer than the model's own cap is what data.too_long decides about.
        found = loaded(list(texts), add_special_tokens=False, verbose=False, return_attention_mask=False)
        ids: list[list[int]] = found["input_ids"]
        return ids

    begin, end = _marks(loaded, encode, folder)
    stop = end or (() if loaded.eos_token_id is None else (loaded.eos_token_id,))
    paddings = (loaded.pad_token_id, loaded.eos_token_id, 0)
    return Tokenizer(
        name=folder,
        encode=encode,
        begin=begin,
        end=end,
        completion_end=stop,
        mask_id=loaded.mask_token_id,
        padding_id=next(token for token in paddings if token is not None),
        # Ids may have holes; the highest one counts.
        vocabulary=max(loaded.get_vocab().values()) + 1,
        special_ids=frozenset((*loaded.all_special_ids, *begin, *end, *stop)),
        masks_padding=True,
    )


def _load(folder: str) -> Any:
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise UsageError(
            f'data.tokenizer is {folder!r}, and there is no such folder; give "bytes" or a local folder '
            f"with a Hugging Face tokenizer (nothing is downloaded)"
        )
    transformers = needed("transformers", extra="hf", why=f"data.tokenizer {folder!r}")
    try:
        return transformers.AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # what a damaged folder raises is not one kind of error
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(
            f"data.tokenizer: no tokenizer could be loaded from {folder}: {first}; the folder needs what "
            f"save_pretrained writes, such as tokenizer.json"
        ) from error


def _marks(
    loaded: Any, encode: Callable[[Sequence[str]], list[list[int]]], folder: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the tokenizer puts before and after a text."""
    if not loaded("", verbose=False)["input_ids"]:
        return (), ()
    for probe in _probes(loaded):
        try:
            (bare,) = encode([probe])
            marked = loaded(probe, verbose=False)["input_ids"]
        except Exception:  # a tokenizer may raise at a text that it has no token for
            continue
        starts = range(len(marked) - len(bare) + 1) if bare else ()
        places = [place for place in starts if marked[place : place + len(bare)] == bare]
        # a mark itself is found twice, and says nothing of what is put around a text
        if len(places) == 1:
            return tuple(marked[: places[0]]), tuple(marked[places[0] + len(bare) :])
    raise UsageError(f"data.tokenizer: the tokenizer in {folder} makes no token of any text")


def _probes(loaded: Any) -> Iterator[str]:
    """Texts that may have a token: a letter, else the tokens themselves."""
    yield "a"
    special = set(loaded.all_special_ids)
    # by number: the vocabulary itself comes in another order each time
    for token, number in sorted(loaded.get_vocab().items(), key=lambda entry: entry[1]):
        if number not in special:
            yield token
