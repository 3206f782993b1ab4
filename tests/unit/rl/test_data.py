import os
import subprocess
import sys
from datetime import date

import datasets
import pytest
from tokenizers.processors import TemplateProcessing

from logra.errors import DataError, ModelError
from logra.rl.data import ListRows, build_prompts, new_digest, update_digest
from logra.rl.sources import load_rows
from logra.rl.tiny import char_tokenizer
from logra.rl.types import Prompt

ROWS = [{"prompt": f"{i}+{i}=", "sum": str(2 * i), "level": i} for i in range(600)]
PAD, EOS, BOS = 0, 1, 2


def plain_tokenizer(*, bos: bool = False, eos: bool = False):
    """Without a chat template; adds BOS and EOS as asked."""
    tokenizer = char_tokenizer()
    tokenizer.chat_template = None
    single = " ".join(["<bos>"] * bos + ["$A"] + ["<eos>"] * eos)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=single, special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
    )
    return tokenizer


def chat_tokenizer(template: str):
    """Adds BOS to plain text, and has a template."""
    tokenizer = plain_tokenizer(bos=True)
    tokenizer.chat_template = template
    return tokenizer


BOS_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[a]{{ think | default('') }}{% endif %}"
)


def chars(tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.convert_tokens_to_ids(list(text)))


def one(rows, tokenizer, **options) -> Prompt:
    prompts = build_prompts(rows, tokenizer, max_prompt_tokens=100, **options)
    assert len(prompts) == 1
    return prompts[0]


# Content, tokens, special tokens


def test_text_is_wrapped_by_the_template_if_there_is_one():
    tokenizer = char_tokenizer()
    prompt = one([{"prompt": "1+1"}], tokenizer, system_prompt="be brief")
    assert prompt.content == "1+1"
    assert tokenizer.decode(prompt.token_ids) == "s:be brief\nu:1+1\na:"


def test_text_stays_plain_without_template_or_on_request():
    for tokenizer in (plain_tokenizer(), char_tokenizer()):
        prompt = one([{"prompt": "1+1"}], tokenizer, chat=False, prompt_prefix="q: ", prompt_suffix=" a:")
        assert prompt.content == "q: 1+1 a:"
        assert prompt.token_ids == chars(tokenizer, "q: 1+1 a:")
    assert one([{"prompt": "1+1"}], plain_tokenizer()).token_ids == chars(tokenizer, "1+1")


def test_messages_with_system_prompt_prefix_and_suffix():
    tokenizer = char_tokenizer()
    messages = [{"role": "user", "content": "1+1", "name": None}]
    prompt = one([{"prompt": messages}], tokenizer, system_prompt="s", prompt_prefix="<", prompt_suffix=".")
    assert prompt.content == [{"role": "system", "content": "s"}, {"role": "user", "content": "<1+1."}]
    reference = tokenizer.apply_chat_template(prompt.content, add_generation_prompt=True, return_dict=False)
    assert list(prompt.token_ids) == reference
    assert messages[0]["content"] == "1+1"  # the data itself is untouched


def test_a_rows_own_system_message_wins():
    messages = [{"role": "system", "content": "own"}, {"role": "user", "content": "1"}]
    assert one([{"prompt": messages}], char_tokenizer(), system_prompt="s").content == messages


@pytest.mark.parametrize(
    ("tokenizer", "text", "options", "num_bos"),
    [
        (plain_tokenizer(bos=True), "1+1", {}, 1),
        (plain_tokenizer(bos=False), "1+1", {}, 0),
        (plain_tokenizer(bos=True), "<bos>1+1", {}, 1),
        (chat_tokenizer(BOS_TEMPLATE), "1+1", {}, 1),
        (chat_tokenizer(BOS_TEMPLATE), "<bos>1+1", {"chat": False}, 1),
        (chat_tokenizer(BOS_TEMPLATE.removeprefix("{{ bos_token }}")), "1+1", {}, 0),
    ],
)
def test_bos_is_there_once_or_not_at_all(tokenizer, text, options, num_bos):
    token_ids = one([{"prompt": text}], tokenizer, **options).token_ids
    assert token_ids.count(BOS) == num_bos
    assert token_ids[0] == BOS or num_bos == 0
    assert EOS not in token_ids


def test_two_bos_tokens_and_double_templating_are_refused():
    with pytest.raises(ModelError, match="two BOS tokens"):
        one([{"prompt": "<bos><bos>1"}], plain_tokenizer())
    with pytest.raises(ModelError, match="two BOS tokens"):
        one([{"prompt": "1"}], chat_tokenizer("{{ bos_token }}" + BOS_TEMPLATE))
    with pytest.raises(DataError, match=r"row 0.*templated already: set chat: false"):
        one([{"prompt": "<bos>[user]1"}], chat_tokenizer(BOS_TEMPLATE))


def test_eos_that_the_tokenizer_appends_is_removed_and_the_datas_own_kept():
    tokenizer = plain_tokenizer(bos=True, eos=True)
    assert one([{"prompt": "1+1"}], tokenizer).token_ids == (BOS, *chars(tokenizer, "1+1"))
    assert one([{"prompt": "<bos>1<eos>"}], tokenizer).token_ids == (BOS, *chars(tokenizer, "1"), EOS)


def test_mixed_text_and_messages_stay_in_order():
    rows = [{"prompt": "1" * (i + 1) if i % 2 else [{"role": "user", "content": "1" * (i + 1)}]} for i in range(9)]
    tokenizer = char_tokenizer()
    prompts = build_prompts(rows, tokenizer, max_prompt_tokens=100)
    assert [tokenizer.decode(p.token_ids) for p in prompts] == [f"u:{'1' * (i + 1)}\na:" for i in range(9)]


def test_template_kwargs_reach_the_template_and_unknown_ones_are_refused():
    tokenizer = chat_tokenizer(BOS_TEMPLATE)
    prompt = one([{"prompt": "1"}], tokenizer, chat_template_kwargs={"think": "no"})
    assert tokenizer.decode(prompt.token_ids[-2:]) == "no"
    for name in ("thinks", "add_generation_prompt"):
        with pytest.raises(DataError, match=f"'{name}' is not a variable"):
            one([{"prompt": "1"}], tokenizer, chat_template_kwargs={name: "no"})
    with pytest.raises(DataError, match="no effect without a chat template"):
        one([{"prompt": "1"}], plain_tokenizer(), chat_template_kwargs={"think": "no"})


def test_missing_template():
    messages = [{"prompt": [{"role": "user", "content": "1"}]}]
    with pytest.raises(ModelError, match=r"list of messages.*model\.chat_template"):
        one(messages, plain_tokenizer())
    with pytest.raises(ModelError, match=r"chat: true needs a chat template.*instruction-tuned"):
        one([{"prompt": "1"}], plain_tokenizer(), chat=True)
    with pytest.raises(DataError, match="chat: false, but the prompt is a list of messages"):
        one(messages, char_tokenizer(), chat=False)
    with pytest.raises(DataError, match="no place for a system_prompt: use prompt_prefix"):
        one([{"prompt": "1"}], plain_tokenizer(), system_prompt="s")


def test_template_that_refuses_names_the_roles():
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}x"
    with pytest.raises(ModelError, match=r"\['system', 'user'\].*no system"):
        one([{"prompt": "1"}], chat_tokenizer(template), system_prompt="s")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([{"role": "user"}], "each message must be"),
        ([{"role": "user", "content": [{"type": "image"}]}], "each message must be"),
        (["hello"], "each message must be"),
        ([{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}], "hold its own answer"),
        (5, "text or a list of messages, not int"),
        ({"role": ["user"], "content": ["1"]}, "text or a list of messages, not dict"),
    ],
)
def test_prompts_of_a_wrong_kind(prompt, message):
    with pytest.raises(DataError, match=f"row 1, column 'prompt'.*{message}"):
        build_prompts([{"prompt": "1"}, {"prompt": prompt}], char_tokenizer(), max_prompt_tokens=100)


# Columns


def test_columns_and_answer():
    rows = [{"prompt": "1", "answer": "long text", "final": "2", "extra": {"a": [1]}}]
    assert one(rows, char_tokenizer()).columns == {"answer": "long text", "final": "2", "extra": {"a": [1]}}
    columns = one(rows, char_tokenizer(), answer_column="final").columns
    assert columns == {"answer": "2", "final": "2", "extra": {"a": [1]}}


def test_missing_columns_list_those_found():
    with pytest.raises(DataError, match=r"no column 'prompt': set prompt_column .*\['question', 'answer'\]"):
        one([{"question": "1", "answer": "2"}], char_tokenizer())
    with pytest.raises(DataError, match=r"no column 'sum': set answer_column .*\['question'\]"):
        one([{"question": "1"}], char_tokenizer(), prompt_column="question", answer_column="sum")


def test_generated_rows_have_their_own_defaults():
    rows = load_rows("reasoning_gym:chain_sum", size=4, params={"max_terms": 2, "max_digits": 1})
    prompts = build_prompts(rows, char_tokenizer(), max_prompt_tokens=200)
    assert [p.content for p in prompts] == [row["question"] for row in rows]
    assert [p.columns["answer"] for p in prompts] == [row["answer"] for row in rows]
    assert prompts[2].columns["entry"] == rows[2]["entry"]


# Filtering


def test_over_long_and_empty_prompts_are_left_out_and_counted_by_templated_length():
    texts = ["1" * 10, "", "1" * 11, None, " \n", "2" * 10]
    rows = [{"prompt": text, "n": i} for i, text in enumerate(texts)]
    rows += [{"prompt": [], "n": 6}, {"prompt": [{"role": "user", "content": " "}], "n": 7}]
    templated = len("u:\na:") + 10
    prompts = build_prompts(rows, char_tokenizer(), max_prompt_tokens=templated)
    assert (prompts.num_too_long, prompts.num_empty, prompts.longest) == (1, 5, templated)
    assert [(p.id, p.columns["n"], p.content) for p in prompts] == [(0, 0, "1" * 10), (5, 5, "2" * 10)]


def test_nothing_left_says_how_long_prompts_are():
    rows = [{"prompt": "1" * n} for n in (20, 50, 30, 40)]
    with pytest.raises(DataError, match=r"4 exceed 9 tokens.*50, 40, 30 tokens, the shortest 20.*\(to 50"):
        build_prompts(rows, plain_tokenizer(), max_prompt_tokens=9)
    with pytest.raises(DataError, match="all 2 are empty"):
        build_prompts([{"prompt": ""}, {"prompt": None}], plain_tokenizer(), max_prompt_tokens=9)


@pytest.mark.parametrize("options", [{"max_prompt_tokens": 0}, {"max_prompt_tokens": 9, "limit": 0}])
def test_limits_must_be_positive(options):
    with pytest.raises(DataError, match="must be at least 1"):
        build_prompts(ROWS, char_tokenizer(), **options)


@pytest.mark.parametrize("limit", [1, 3, 256, 300, 5000])
def test_limit_counts_usable_prompts(limit):
    rows = [{"prompt": ""}, *ROWS]
    prompts = build_prompts(rows, char_tokenizer(), max_prompt_tokens=100, limit=limit)
    assert [p.id for p in prompts] == list(range(1, min(limit, 600) + 1))
    assert prompts.num_empty == 1


# The sequence


def test_sequence_equals_one_by_one_reference():
    tokenizer = char_tokenizer()
    prompts = build_prompts(datasets.Dataset.from_list(ROWS).to_list(), tokenizer, max_prompt_tokens=100)
    assert len(prompts) == 600
    for i in (0, 1, 255, 256, 257, 599):
        message = [{"role": "user", "content": ROWS[i]["prompt"]}]
        ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
        expected = Prompt(i, ROWS[i]["prompt"], tuple(ids), {"sum": ROWS[i]["sum"], "level": i})
        assert prompts[i] == expected
    assert prompts[-1] == prompts[599]
    assert prompts[5:8] == [prompts[5], prompts[6], prompts[7]]
    assert all(type(token) is int for token in prompts[0].token_ids)
    with pytest.raises(IndexError):
        prompts[600]


def test_fingerprint_changes_with_all_that_matters_and_nothing_else():
    def fingerprint(rows=ROWS, tokenizer=None, **options):
        options = {"max_prompt_tokens": 100} | options
        return build_prompts(rows, tokenizer or char_tokenizer(), **options).fingerprint

    changed = [*ROWS[:-1], {**ROWS[-1], "level": -1}]
    different = [
        fingerprint(changed),
        fingerprint(ROWS[::-1]),
        fingerprint([{"prompt": ""}, *ROWS]),
        fingerprint(limit=599),
        fingerprint(system_prompt="s"),
        fingerprint(chat=False),
        fingerprint(max_prompt_tokens=12),
    ]
    assert len({fingerprint(), *different}) == 8
    assert fingerprint() == fingerprint(max_prompt_tokens=99) == fingerprint(limit=600)
    reordered = [dict(reversed(row.items())) for row in ROWS]
    assert fingerprint(reordered) == fingerprint()


def test_fingerprint_is_the_same_in_another_process():
    code = (
        "from logra.rl.data import ListRows;"
        "print(ListRows([{'a': {'x', 'y', 'z', 'w'}, 'b': [1, None, 2.5, True, (1, 's')]}]).fingerprint)"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1 and len(outputs.pop().strip()) == 32


def test_digest_tells_values_apart():
    values = [
        None, True, 1, 1.0, "1", b"1", [1], [[1]], ["1", ""], ["", "1"], {"1": ""}, {"a": 1, "b": 2},
        {"a": 2, "b": 1}, [], {}, "", date(2026, 1, 2), date(2026, 1, 3), object(), float("nan"),
    ]  # fmt: skip
    digests = []
    for value in values:
        digest = new_digest()
        update_digest(digest, value)
        digests.append(digest.hexdigest())
    assert len(set(digests)) == len(values)


def test_list_rows_fill_missing_columns():
    rows = ListRows([{"a": 1}, {"b": 2}])
    assert rows.columns == ("a", "b")
    assert list(rows) == [{"a": 1, "b": None}, {"a": None, "b": 2}]
