"""Penalties at every node of a tree: those of the node's own text, as transformers and vLLM define them."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from draftsmith.infer.penalties import TokenCounts, penalise
from draftsmith.infer.sampling import Sampling, SamplingParams
from draftsmith.infer.tree import TokenTree

from .one_token import next_law

VOCAB = 12
PLAIN = SamplingParams(temperature=1.0)
SETTINGS = [
    replace(PLAIN, repetition_penalty=1.5),
    replace(PLAIN, repetition_penalty=0.6),
    replace(PLAIN, presence_penalty=0.7),
    replace(PLAIN, frequency_penalty=-0.4),
    replace(PLAIN, repetition_penalty=1.2, presence_penalty=-0.5, frequency_penalty=0.9),
    PLAIN,
]
PARENTS = [-1, 0, 0, 1, 1, 2, 3, 6]


def by_hand(logits: Tensor, prompt: list[int], output: list[int], params: SamplingParams) -> Tensor:
    """(V,) for one text: repetition by transformers' processor over all of it, then the OpenAI formula for the output."""
    scores = logits.float()[None]
    if params.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(torch.tensor([prompt + output]), scores)
    scores = scores[0].clone()
    for token, count in Counter(output).items():
        scores[token] -= params.frequency_penalty * count + params.presence_penalty
    return scores


def texts(rows: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and outputs of different lengths, with repeated tokens; the last token of each is the anchor."""
    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(VOCAB, (16 - 3 * row,), generator=draw).tolist() for row in range(rows)]
    outputs = [
        [*prompts[row][:1], *torch.randint(VOCAB, (1 + 7 * row % 5,), generator=draw).tolist()] for row in range(rows)
    ]
    return prompts, outputs


def counted(prompt: list[int], output: list[int]) -> TokenCounts:
    counts = TokenCounts(prompt)
    for token in output:
        counts.add(token)
    return counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_node_is_penalised_for_its_own_text(dtype: torch.dtype) -> None:
    rows = len(SETTINGS)
    prompts, outputs = texts(rows)
    tokens = torch.randint(VOCAB, (rows, len(PARENTS)))
    tokens[:, 0] = torch.tensor([output[-1] for output in outputs])
    tokens[0, [3, 6]] = int(tokens[0, 1])  # a token twice on one path
    tokens[:, 2] = torch.tensor([prompt[0] for prompt in prompts])  # of which the padding of shorter texts is made
    valid = torch.rand(tokens.shape) < 0.8
    tree = TokenTree(tokens, torch.tensor(PARENTS).expand(rows, -1), valid)
    logits = (torch.randn(rows, len(PARENTS), VOCAB) * 3).to(dtype)
    kept = logits.clone()
    counts = [counted(prompt, output) for prompt, output in zip(prompts, outputs)]
    found = penalise(logits, tree, Sampling(SETTINGS), [*counts[:-1], None])
    for row, node in itertools.product(range(rows), range(len(PARENTS))):
        path = [int(tokens[row, up]) for up in range(1, node + 1) if tree.ancestors[row, node, up]]
        expected = by_hand(logits[row, node], prompts[row], outputs[row] + path, SETTINGS[row])
        torch.testing.assert_close(found[row, node], expected, atol=1e-5, rtol=1e-6)
    assert torch.equal(found[-1], logits[-1].float()), "a row without penalties changed"
    assert torch.equal(logits, kept), "the target's logits were written to"


def test_a_row_owes_nothing_to_its_batch() -> None:
    prompts, outputs = texts(6)
    tokens = torch.randint(VOCAB, (6, len(PARENTS)))
    tree = TokenTree(tokens, torch.tensor(PARENTS).expand(6, -1), torch.ones_like(tokens, dtype=torch.bool))
    logits = torch.randn(6, len(PARENTS), VOCAB)
    counts = [counted(prompt, output) for prompt, output in zip(prompts, outputs)]
    together = penalise(logits, tree, Sampling(SETTINGS), counts)
    for row, params in enumerate(SETTINGS):
        one = slice(row, row + 1)
        alone = TokenTree(tokens[one], tree.parents[one], tree.valid[one])
        assert torch.equal(penalise(logits[one], alone, Sampling([params]), counts[one])[0], together[row])


def test_without_penalties_nothing_is_done() -> None:
    logits, tree = torch.randn(2, 1, VOCAB).bfloat16(), TokenTree.root(torch.zeros(2, dtype=torch.int64))
    assert penalise(logits, tree, Sampling([PLAIN, SamplingParams()]), [None, None]) is logits


def test_the_worked_example_of_the_docstring() -> None:
    """Prompt "a b", output "b", draft "c b" as a chain."""
    a, b, c = range(3)
    tree = TokenTree.chain(torch.tensor([b]), torch.tensor([[c, b]]))
    frequency = penalise(
        torch.zeros(1, 3, 4), tree, Sampling([replace(PLAIN, frequency_penalty=1.0)]), [counted([a, b], [b])]
    )
    assert frequency[0].tolist() == [[0, -1, 0, 0], [0, -1, -1, 0], [0, -2, -1, 0]]
    repetition = penalise(
        torch.ones(1, 3, 4), tree, Sampling([replace(PLAIN, repetition_penalty=2.0)]), [counted([a, b], [b])]
    )
    assert repetition[0].tolist() == [[0.5, 0.5, 1, 1], [0.5, 0.5, 0.5, 1], [0.5, 0.5, 0.5, 1]]


def test_impossible_tokens_stay_impossible() -> None:
    logits = torch.full((1, 1, 4), -torch.inf)
    logits[0, 0, 3] = 1.0
    params = SETTINGS[4]
    found = penalise(logits, TokenTree.root(torch.tensor([1])), Sampling([params]), [counted([0, 1], [1, 1])])
    assert found[0, 0].tolist() == [-math.inf, -math.inf, -math.inf, 1.0]


@pytest.mark.parametrize("params", [replace(SETTINGS[4], min_p=0.2, temperature=0.7), replace(SETTINGS[0], top_k=2)])
def test_the_law_of_all_outputs_is_that_of_plain_sampling(params: SamplingParams) -> None:
    """By enumeration: every output of three tokens over a vocabulary of three, once as a path of one tree that holds them
    all, and once token by token in double precision."""
    vocab, length, prompt = 3, 3, [0, 2, 2]
    paths = [path for size in range(length) for path in itertools.product(range(vocab), repeat=size)]
    world = dict(
        zip(paths, torch.randn(len(paths), vocab))
    )  # breadth first: a tree's node each, the empty one its root
    tokens = torch.tensor([[prompt[-1], *(path[-1] for path in paths[1:])]])
    parents = torch.tensor([[-1, *(paths.index(path[:-1]) for path in paths[1:])]])
    tree = TokenTree(tokens, parents, torch.ones_like(tokens, dtype=torch.bool))
    sampling = Sampling([params])
    logits = torch.stack([world[path] for path in paths])[None]
    rows = sampling.log_probs(penalise(logits, tree, sampling, [TokenCounts(prompt)])).double().exp()[0]
    total = 0.0
    for output in itertools.product(range(vocab), repeat=length):
        found = math.prod(float(rows[paths.index(output[:step]), output[step]]) for step in range(length))
        laws = [next_law(world[output[:step]].tolist(), prompt, output[:step], params) for step in range(length)]
        expected = math.prod(law[token] for law, token in zip(laws, output))
        assert found == pytest.approx(expected, abs=1e-6)
        total += found
    assert total == pytest.approx(1, abs=1e-5)
