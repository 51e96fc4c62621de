"""The byte-level BPE tokenizer of SmolLM2, built from the vocabulary inside the GGUF file, and its chat format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from smollm2_weights import Vocabulary
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SYSTEM_PROMPT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


class ChatTokenizer:
    """Text to token ids and back.

    Text is always plain: a prompt that spells ``<|im_end|>`` is encoded as those characters, never as the control
    token.  Control tokens enter through `start_chat` and `next_turn` alone.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        ids = {token: i for i, token in enumerate(vocabulary.tokens)}
        merges = [tuple(rule.split(" ")) for rule in vocabulary.merges]
        self._bpe = Tokenizer(models.BPE(ids, merges))
        self._bpe.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        self._bpe.decoder = decoders.ByteLevel()
        specials = [vocabulary.tokens[i] for i in vocabulary.special_ids]
        self._bpe.add_special_tokens([AddedToken(token, special=True) for token in specials])
        self._bpe.encode_special_tokens = True
        self._start, self._end = ids["<|im_start|>"], ids["<|im_end|>"]
        self.stop_ids = frozenset({vocabulary.eos_id, self._end, ids["<|endoftext|>"]})

    def encode(self, text: str) -> list[int]:
        return self._bpe.encode(text).ids

    def decode(self, ids: Iterable[int]) -> str:
        return self._bpe.decode(list(ids))

    def _message(self, role: str, content: str) -> list[int]:
        return [self._start, *self.encode(f"{role}\n{content}"), self._end, *self.encode("\n")]

    def system_message(self, text: str = SYSTEM_PROMPT) -> list[int]:
        """Ids with which every conversation under this system prompt begins."""
        return self._message("system", text)

    def start_chat(self, user: str, system: str = SYSTEM_PROMPT) -> list[int]:
        """Ids of a conversation's first user message, up to where the answer begins."""
        return self.system_message(system) + self._user_turn(user)

    def next_turn(self, user: str, last_id: int) -> list[int]:
        """Ids that follow an answer ending in `last_id`, up to where the next answer begins."""
        answer_end = [] if last_id == self._end else [self._end]
        return answer_end + self.encode("\n") + self._user_turn(user)

    def _user_turn(self, user: str) -> list[int]:
        return self._message("user", user) + [self._start, *self.encode("assistant\n")]

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Text pieces as ids arrive; a character whose bytes lie in several tokens is held back until complete."""
        decoding = decoders.DecodeStream(skip_special_tokens=True)
        for token_id in ids:
            piece = decoding.step(self._bpe, token_id)
            if piece:
                yield piece
