"""Rows of a data set, and the prompts made of them: templated, tokenised once, filtered by length.

Departures from what is common: special tokens are counted, not hoped for (a chat template that writes the BOS
itself and a tokenizer that adds another give a broken prompt without an error); a misspelled template option
is refused; prompts that are too long or empty are left out and counted. Token ids lie in one flat array, rows
stay with their source.
"""

from __future__ import annotations

import hashlib
import itertools
from abc import ABC, abstractmethod
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from jinja2 import TemplateError

from logra.errors import DataError, ModelError
from logra.rl.types import Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = dict[str, Any]
BATCH_ROWS = 256
_NO_TEMPLATE_FIX = "Use an instruction-tuned model, set model.chat_template, or give plain text with data.chat: false"
_OWN_KWARGS = ("add_generation_prompt", "tokenize", "conversation", "continue_final_message")


class Rows(ABC):
    """A sequence of rows.

    columns: names in order; every row has all of them (None where the source has no value).
    fingerprint: hex; changes when the data does.
    default_prompt, default_answer: the columns to use when the user names none.
    """

    columns: tuple[str, ...]
    fingerprint: str
    default_prompt: str = "prompt"
    default_answer: str | None = None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Row: ...

    def __iter__(self) -> Iterator[Row]:
        for index in range(len(self)):
            yield self[index]


class ListRows(Rows):
    """Rows from a list of dicts."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        self.columns = union_of_columns(rows)
        digest = new_digest()
        for row in rows:
            update_digest(digest, row)
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return dict.fromkeys(self.columns) | self._rows[index]


class PromptFormat:
    """How a row becomes content (what rewards see) and token ids. Arguments as in `build_prompts`."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        prompt_column: str,
        answer_column: str | None = None,
        system_prompt: str | None = None,
        prompt_prefix: str = "",
        prompt_suffix: str = "",
        chat: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._bos, self._eos = (str(token or "") for token in (tokenizer.bos_token, tokenizer.eos_token))
        self.prompt_column, self.answer_column = prompt_column, answer_column
        self.system_prompt = system_prompt
        self.prefix, self.suffix = prompt_prefix, prompt_suffix
        self.chat = chat
        self.template = _chat_template(tokenizer)
        self.template_kwargs = dict(chat_template_kwargs or {})
        if chat and self.template is None:
            raise ModelError(f"chat: true needs a chat template. {_NO_TEMPLATE_FIX}")
        self.is_text_wrapped = self.template is not None if chat is None else chat
        _check_template_kwargs(self.template_kwargs, self.template if chat is not False else None)

    def content(self, row: Row, index: int) -> str | list[Message] | None:
        """The prompt as text or as messages, with system prompt, prefix and suffix; None if it is empty."""
        value = row[self.prompt_column]
        where = f"row {index}, column {self.prompt_column!r}"
        if value is None or isinstance(value, str):
            return self._text_content(value or "", where)
        if isinstance(value, list):
            return self._chat_content(_check_messages(value, where), where)
        raise DataError(f"{where}: a prompt is text or a list of messages, not {type(value).__name__}")

    def columns(self, row: Row) -> Row:
        """Every column but the prompt. The answer column is also under "answer", in place of one so named."""
        columns = {name: value for name, value in row.items() if name != self.prompt_column}
        if self.answer_column is not None:
            columns["answer"] = row[self.answer_column]
        return columns

    def token_ids(self, contents: Sequence[str | list[Message]]) -> list[list[int]]:
        """Unpadded ids. Special tokens come from the template or, for plain text, from the tokenizer."""
        rendered = [self._render(content) for content in contents]
        token_ids: list[list[int]] = [[] for _ in contents]
        for adds_special in (False, True):
            chosen = [i for i, (_, adds) in enumerate(rendered) if adds is adds_special]
            texts = [rendered[i][0] for i in chosen]
            for i, ids in zip(chosen, self._encode(texts, adds_special), strict=True):
                token_ids[i] = ids
        return token_ids

    def _text_content(self, text: str, where: str) -> str | None:
        if not text.strip():
            return None
        if not self.is_text_wrapped and self.system_prompt is not None:
            raise DataError(
                f"{where}: plain text has no place for a system_prompt: use prompt_prefix, or a chat template"
            )
        if self.is_text_wrapped and self._has_bos(text):
            raise DataError(f"{where}: the text starts with {self._bos!r}, so it is templated already: set chat: false")
        return self.prefix + text + self.suffix

    def _chat_content(self, messages: list[Message], where: str) -> list[Message] | None:
        if not messages or not messages[-1]["content"].strip():
            return None
        if self.chat is False:
            raise DataError(f"{where}: chat: false, but the prompt is a list of messages: remove chat, or give text")
        if self.template is None:
            raise ModelError(f"{where}: the prompt is a list of messages. {_NO_TEMPLATE_FIX}")
        last = messages[-1]
        if last["role"] == "assistant":
            raise DataError(
                f"{where}: the last message is the assistant's, so the prompt would hold its own answer: "
                "end each prompt with a user message"
            )
        messages[-1] = {**last, "content": self.prefix + last["content"] + self.suffix}
        return self._with_system_prompt(messages)

    def _with_system_prompt(self, messages: list[Message]) -> list[Message]:
        """A row that brings its own system message keeps that one."""
        if self.system_prompt is None or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": self.system_prompt}, *messages]

    def _has_bos(self, text: str) -> bool:
        return bool(self._bos) and text.startswith(self._bos)

    def _render(self, content: str | list[Message]) -> tuple[str, bool]:
        """The text to tokenise, and whether the tokenizer must add its special tokens."""
        if isinstance(content, str):
            if not self.is_text_wrapped:
                # Text that starts with the BOS was templated by whoever made the data.
                return content, not self._has_bos(content)
            content = self._with_system_prompt([{"role": "user", "content": content}])
        try:
            text = self.tokenizer.apply_chat_template(
                content, tokenize=False, add_generation_prompt=True, **self.template_kwargs
            )
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            roles = [message["role"] for message in content]
            raise ModelError(
                f"the chat template refuses a prompt with roles {roles} ({type(error).__name__}: {error}): "
                "change the messages, the system_prompt or chat_template_kwargs"
            ) from error
        assert isinstance(text, str)
        return text, False

    def _encode(self, texts: list[str], adds_special: bool) -> list[list[int]]:
        if not texts:
            return []
        encoded = self.tokenizer(
            texts, add_special_tokens=adds_special, padding=False, truncation=False, verbose=False
        )["input_ids"]
        eos, bos = self.tokenizer.eos_token_id, self.tokenizer.bos_token_id
        token_ids = []
        for text, ids in zip(texts, encoded, strict=True):
            # A tokenizer set to end its input with EOS would tell the model that all is said.
            if adds_special and len(ids) > 1 and ids[-1] == eos and not text.endswith(self._eos):
                ids = ids[:-1]
            if bos is not None and ids[:2] == [bos, bos]:
                raise ModelError(
                    f"a prompt starts with two BOS tokens: {text[:60]!r}. The data or the prompt_prefix adds "
                    "one that the tokenizer or the chat template adds too: remove it there"
                )
            token_ids.append(list(ids))
        return token_ids


class PromptSet(Sequence[Prompt]):
    """The usable prompts, by position. A prompt's id is its row in the source, whatever was left out.

    num_too_long, num_empty, num_excluded: rows left out. longest: tokens of the longest prompt kept.
    fingerprint: hex, of ids, token ids and whole rows: it changes with the data, the tokenizer, the template
        and the filter.
    """

    def __init__(self, rows: Rows, prompt_format: PromptFormat, census: _Census) -> None:
        self._rows, self._format, self._census = rows, prompt_format, census
        self.num_too_long = len(census.too_long)
        self.num_empty = census.num_empty
        self.num_excluded = census.num_excluded
        self.longest = int(np.diff(census.ends, prepend=0).max())
        self.fingerprint = census.digest.hexdigest()

    def __len__(self) -> int:
        return len(self._census.ids)

    def longest_prompt(self) -> Prompt:
        """The first of the longest prompts."""
        return self[int(np.argmax(np.diff(self._census.ends, prepend=0)))]

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        row_index = self._census.ids[index]
        row = self._rows[row_index]
        content = self._format.content(row, row_index)
        assert content is not None
        start = self._census.ends[index - 1] if index else 0
        token_ids = tuple(self._census.tokens[start : self._census.ends[index]])
        return Prompt(row_index, content, token_ids, self._format.columns(row))


class _Census:
    """What `build_prompts` found: `tokens` holds the kept prompts end to end, prompt i ends at `ends[i]`."""

    def __init__(self) -> None:
        self.ids, self.tokens, self.ends = array("q"), array("q"), array("q")
        self.too_long = array("q")
        self.num_empty = self.num_excluded = 0
        self.digest = new_digest()

    def add(self, row_index: int, row: Row, token_ids: list[int]) -> None:
        self.ids.append(row_index)
        self.tokens.extend(token_ids)
        self.ends.append(len(self.tokens))
        update_digest(self.digest, [row_index, np.array(token_ids, "<i8").tobytes(), row])


def build_prompts(
    rows: Rows | Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt_column: str | None = None,
    answer_column: str | None = None,
    system_prompt: str | None = None,
    prompt_prefix: str = "",
    prompt_suffix: str = "",
    chat: bool | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    max_prompt_tokens: int,
    limit: int | None = None,
    exclude: Collection[tuple[int, ...]] = (),
) -> PromptSet:
    """Template and tokenise every prompt once, leave out the empty and the over-long, and count them.

    rows: from `load_rows`, or any sequence of dicts.
    prompt_column: holds text or chat messages ([{"role", "content"}, ...]). None: "question" of generated
        data, else "prompt".
    answer_column: its value is also given under "answer". None: "answer" of generated data, else nothing is
        added.
    system_prompt: first message, unless the row's own messages start with one.
    prompt_prefix, prompt_suffix: put around the text, or around the last message.
    chat: None wraps text as one user message if the tokenizer has a chat template; True insists on it; False
        keeps it plain.
    chat_template_kwargs: variables of the template, e.g. {"enable_thinking": False}; one it does not use is
        an error.
    max_prompt_tokens: longest prompt kept, in tokens, after templating.
    limit: stop after this many usable prompts.
    exclude: token ids of prompts to leave out, such as the held-out ones; give a set.

    Not handled: images, tools called inside prompts, prompts that end in a half-written answer.
    Raises DataError (columns, prompts, nothing left) or ModelError (template, special tokens).
    """
    for name, value in (("max_prompt_tokens", max_prompt_tokens), ("limit", limit)):
        if value is not None and value < 1:
            raise DataError(f"{name} is {value}: it must be at least 1")
    rows = rows if isinstance(rows, Rows) else ListRows(rows)
    prompt_format = PromptFormat(
        tokenizer,
        prompt_column=_require_column(rows, prompt_column or rows.default_prompt, "prompt_column"),
        answer_column=_require_answer(rows, answer_column or rows.default_answer),
        system_prompt=system_prompt,
        prompt_prefix=prompt_prefix,
        prompt_suffix=prompt_suffix,
        chat=chat,
        chat_template_kwargs=chat_template_kwargs,
    )
    census = _take_census(rows, prompt_format, max_prompt_tokens, limit, exclude)
    if not census.ids:
        raise DataError(_nothing_left(census, max_prompt_tokens))
    return PromptSet(rows, prompt_format, census)


def _take_census(
    rows: Rows,
    prompt_format: PromptFormat,
    max_prompt_tokens: int,
    limit: int | None,
    exclude: Collection[tuple[int, ...]],
) -> _Census:
    census = _Census()
    numbered = enumerate(rows)
    while chunk := list(itertools.islice(numbered, min(BATCH_ROWS, limit or BATCH_ROWS))):
        contents = [prompt_format.content(row, index) for index, row in chunk]
        encoded = iter(prompt_format.token_ids([content for content in contents if content is not None]))
        for (index, row), content in zip(chunk, contents, strict=True):
            token_ids = [] if content is None else next(encoded)
            if not token_ids:
                census.num_empty += 1
            elif len(token_ids) > max_prompt_tokens:
                census.too_long.append(len(token_ids))
            elif exclude and tuple(token_ids) in exclude:
                census.num_excluded += 1
            else:
                census.add(index, row, token_ids)
            if len(census.ids) == limit:
                return census
    return census


def _nothing_left(census: _Census, max_prompt_tokens: int) -> str:
    lengths = sorted(census.too_long, reverse=True)
    if census.num_excluded:
        return (
            f"no prompt is left to train on: {census.num_excluded} are held-out ones too, {len(lengths)} are too long, "
            f"{census.num_empty} empty: hold out fewer (eval.num_prompts), give more data, or set eval.hold_out to false"
        )
    if not lengths:
        return f"no usable prompt: all {census.num_empty} are empty: does prompt_column name the right column?"
    return (
        f"no usable prompt: {len(lengths)} exceed {max_prompt_tokens} tokens, {census.num_empty} are empty. "
        f"The longest have {', '.join(map(str, lengths[:3]))} tokens, the shortest {lengths[-1]}: raise "
        f"data.max_prompt_tokens (to {lengths[0]} to keep all), or shorten the system prompt or the data"
    )


def _require_column(rows: Rows, column: str, option: str) -> str:
    if column not in rows.columns:
        raise DataError(
            f"there is no column {column!r}: set {option} to one of the columns found, {list(rows.columns)}"
        )
    return column


def _require_answer(rows: Rows, column: str | None) -> str | None:
    return None if column is None else _require_column(rows, column, "answer_column")


def _chat_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    if not tokenizer.chat_template:
        return None
    try:
        return tokenizer.get_chat_template()
    except ValueError as error:
        raise ModelError(f"the tokenizer's chat template cannot be used: {error}. {_NO_TEMPLATE_FIX}") from error


def _check_template_kwargs(kwargs: Mapping[str, Any], template: str | None) -> None:
    if kwargs and template is None:
        raise DataError(f"chat_template_kwargs {dict(kwargs)} have no effect without a chat template: remove them")
    for name in kwargs:
        if name in _OWN_KWARGS or name not in str(template):
            raise DataError(
                f"chat_template_kwargs: {name!r} is not a variable of this chat template that can be set: "
                "correct its name or remove it"
            )


def _check_messages(messages: list[Any], where: str) -> list[Message]:
    """The messages without empty keys (Arrow fills absent ones with None)."""
    for message in messages:
        is_valid = isinstance(message, dict) and all(isinstance(message.get(k), str) for k in ("role", "content"))
        if not is_valid:
            raise DataError(f"{where}: each message must be {{'role': text, 'content': text}}, not {str(message)[:80]}")
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def union_of_columns(rows: Iterable[Row]) -> tuple[str, ...]:
    columns: dict[str, None] = {}
    for row in rows:
        columns.update(dict.fromkeys(row))
    return tuple(columns)


def new_digest(data: bytes = b"") -> hashlib.blake2b:
    """The hash all fingerprints use: blake2b of 16 bytes."""
    return hashlib.blake2b(data, digest_size=16)


def update_digest(digest: hashlib.blake2b, value: Any) -> None:
    """Feed a nested value. Dicts and sets count without order; objects of other types (images) by type."""
    if isinstance(value, Mapping):
        digest.update(b"d%d;" % len(value))
        for key in sorted(value, key=repr):
            update_digest(digest, key)
            update_digest(digest, value[key])
    elif isinstance(value, (list, tuple)):
        digest.update(b"l%d;" % len(value))
        for item in value:
            update_digest(digest, item)
    elif isinstance(value, (set, frozenset)):
        update_digest(digest, sorted(value, key=repr))
    else:
        data = value if isinstance(value, bytes) else _scalar_text(value).encode()
        digest.update(b"%s%d;%s" % (type(value).__name__.encode(), len(data), data))


def _scalar_text(value: Any) -> str:
    is_plain = value is None or isinstance(value, (str, bool, int, float, date, time, timedelta, Decimal, np.generic))
    return str(value) if is_plain else ""
