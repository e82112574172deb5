"""A small language model as the drafter: it reads the same text and proposes what it would write, as a chain.

Leviathan et al. 2023 and Chen et al. 2023 ("speculative decoding", "speculative sampling"). Any causal LM with the
target's vocabulary will do; its logits are cut or padded to the target's where one of the two is padded.

- Coupled (the default): greedy rows propose the model's argmax. Sampled rows propose argmax(log q + G), q being the
  model's own row after the request's temperature, top-k and top-p, and G the very noise with which the target will
  choose the token of that position. Exact under sample-match, and with one seed the text is the same with any draft
  model or none. Where q = p the proposal is always right.
- Drawn (`is_drawn`): tokens are sampled from q with noise of their own, and q is kept for the rejection verifiers.

A chain may end early: after the token at which the product of the proposals' confidences falls below `min_confidence`,
never before it, so nothing is dropped because of what it is (see propose.py). The confidence of a coupled proposal is
its share of softmax(log q + G), which for greedy rows is q itself; that of a drawn one is its q.

The model has a KV cache of its own. After each round the tokens that were both drafted and accepted stay read; the rest
of the accepted ones is read together with the next anchor.

Letters: B rows, M nodes of one depth, N nodes, K draft length, A tokens just read, V the target's vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from .cache import KVCache
from .drafter import Observation
from .prefixes import read_on
from .propose import draw_next
from .sampling import Sampling
from .target import Target
from .tree import TokenTree

PREFILL_TOKENS = 512
"""Prompt tokens read in one forward."""
CATCH_UP_TOKENS = 64
"""Tokens read in one forward by a model that was not asked for a while: a chain's mask is the square of its length."""


@dataclass
class DraftState:
    """What the draft model knows of each row. Slot s of a row stands for absolute position s."""

    cache: KVCache
    text: Tensor
    """(rows, capacity) int64: the text, and after it what was drafted last."""
    read: Tensor
    """(rows,) int64: leading tokens of `text` whose keys and values are in the cache."""

    def reserve(self, length: int) -> None:
        """Make room for `length` tokens per row."""
        self.cache.reserve(length)
        missing = self.cache.capacity - self.text.shape[1]
        if missing:
            self.text = pad(self.text, (0, missing))


@dataclass(frozen=True)
class Unread:
    """What the draft model has to read before it can propose."""

    at: Tensor
    """(B,) int64: positions of the anchors."""
    read: Tensor
    """(B,) int64: tokens read."""
    longest: int
    """Maximum of `at`."""
    read_by_any: int
    """Maximum of `read`."""
    count: int
    """Maximum of at - read."""


@dataclass(frozen=True)
class Opening:
    """The draft model has read everything up to the anchors and can begin to propose."""

    lengths: Tensor
    """(B,) int64: positions of the anchors."""
    longest: int
    """Their maximum."""
    alive: Tensor
    """(B,) bool: rows in which a draft still fits the model's context."""
    logits: Tensor
    """(B, V): the model's, after the anchors."""


class DraftReader:
    """What all draft-model drafters share: reading the text, one round behind the target.

    model: the draft model, wrapped like a target. target: what it drafts for. depth: tokens drafted beyond the anchor.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, model: Target, target: Target, *, depth: int) -> None:
        check_vocabulary(model, target)
        model.check_draft(target)
        if not 1 <= depth < model.max_length - 1:
            raise ValueError(
                f"a draft must be at least 1 token deep and fit the context of {model.name}, {model.max_length} tokens; got {depth}."
            )
        self.model, self.depth, self.vocab_size = model, depth, target.vocab_size
        self._limit = model.max_length - 1 - depth  # the last anchor position after which a whole draft fits
        self._stops = torch.tensor(target.eos_ids, dtype=torch.int64, device=model.device)

    def start(self, *, rows: int, capacity: int) -> DraftState:
        text = torch.zeros(rows, capacity, dtype=torch.int64, device=self.model.device)
        return DraftState(self.model.new_cache(rows=rows, capacity=capacity), text, torch.zeros_like(text[:, 0]))

    def move(self, state: DraftState, source: int, target: int) -> None:
        state.cache.move(source, target, length=int(state.read[source]))
        state.text[target], state.read[target] = state.text[source], state.read[source]

    def observe(self, state: DraftState, seen: Observation) -> None:
        """Note the text. Tokens that equal what was drafted stay read; a prompt is read here."""
        width = seen.tokens.shape[1]
        state.reserve(int(seen.start.max()) + width)
        text, read = state.text[seen.rows], state.read[seen.rows]
        columns = torch.arange(width, device=text.device)
        slots, real = seen.start[:, None] + columns, columns < seen.count[:, None]
        before = text.gather(1, slots)
        agreed = ((before == seen.tokens) & real).cumprod(dim=1).sum(dim=1)
        text.scatter_(1, slots, torch.where(real, seen.tokens, before))
        if seen.is_prompt:
            counts = seen.count.clamp(max=self._limit)
            ends, known = counts.tolist(), read.clamp(max=seen.known).minimum(counts).tolist()
            read.copy_(counts)
            for row, (count, held) in enumerate(zip(ends, known), start=seen.rows.start):
                self._read_prompt(state, row, count, held)
        else:
            read.copy_(torch.minimum(read, seen.start + agreed))

    def _read_prompt(self, state: DraftState, row: int, count: int, held: int) -> None:
        """The first `count` tokens of a row's text, of which it has read `held`."""
        tokens = self._known(state.text[row, :count])
        if held and held < count:
            read_on(self.model, [tokens.tolist()], [held], state.cache, first_row=row, budget=PREFILL_TOKENS)
        elif count and not held:
            self.model.read_prompts([tokens], state.cache, first_row=row, budget=PREFILL_TOKENS)

    def _unread(self, state: DraftState, anchors: Tensor, lengths: Tensor) -> Unread | None:
        """Note the anchors and read what is far behind them; None if no row has room for a draft.

        Rows beyond the model's context are kept at its end, where nothing reads what they do.
        """
        at, read = lengths.clamp(max=self._limit), state.read[: len(anchors)].clamp(max=self._limit)
        edges = torch.stack([lengths.min(), at.max(), read.max(), (at - read).max()])
        shortest, longest, read_by_any, count = edges.tolist()
        if shortest > self._limit:
            return None
        state.reserve(longest + 1 + self.depth)
        state.text[: len(anchors)].scatter_(1, at[:, None], anchors[:, None])
        while count > CATCH_UP_TOKENS:
            self._read(state, read, at, width=CATCH_UP_TOKENS, read_by_any=read_by_any)
            read = (read + CATCH_UP_TOKENS).minimum(at)
            read_by_any, count = min(read_by_any + CATCH_UP_TOKENS, longest), count - CATCH_UP_TOKENS
        return Unread(at, read, longest, read_by_any, count)

    def _read(self, state: DraftState, read: Tensor, at: Tensor, *, width: int, read_by_any: int) -> Tensor:
        """The model's hidden states (B, width, D) at each row's next tokens; after a row's anchor, that token again."""
        slots = (read[:, None] + torch.arange(width, device=read.device)).minimum(at[:, None])
        tokens = self._known(state.text[: len(at)].gather(1, slots))
        tree = TokenTree.chain(tokens[:, 0], tokens[:, 1:])
        return self.model.verify(tree, read, state.cache, longest=read_by_any).hidden

    def _open(self, state: DraftState, anchors: Tensor, lengths: Tensor) -> Opening | None:
        """Read each row's tokens that are still unread, the anchor last; None if no row has room for a draft."""
        left = self._unread(state, anchors, lengths)
        if left is None:
            return None
        hidden = self._read(state, left.read, left.at, width=left.count + 1, read_by_any=left.read_by_any)
        state.read[: len(anchors)] = left.at + 1
        anchor_hidden = hidden[torch.arange(len(anchors), device=hidden.device), left.at - left.read]
        return Opening(left.at, left.longest, lengths <= self._limit, self._logits(anchor_hidden))

    def _read_level(self, state: DraftState, tree: TokenTree, opening: Opening, count: int) -> Tensor:
        """(B, M, V): logits at the last `count` nodes of a growing tree whose other nodes were read before."""
        known = TokenTree(self._known(tree.tokens), tree.parents, tree.valid)
        skip = tree.num_nodes - count
        reading = self.model.verify(known, opening.lengths, state.cache, longest=opening.longest, skip=skip)
        return self._logits(reading.hidden)

    def _logits(self, hidden: Tensor) -> Tensor:
        """(..., D) -> (..., V): what only one of the two vocabularies has cannot be proposed."""
        logits = self.model.logits(hidden)[..., : self.vocab_size]
        missing = self.vocab_size - logits.shape[-1]
        return pad(logits, (0, missing), value=-torch.inf) if missing else logits

    def _known(self, tokens: Tensor) -> Tensor:
        """Tokens that the model has an embedding for; its last stands for padding ids of the target."""
        return tokens.clamp(max=self.model.vocab_size - 1)

    def _scores(self, logits: Tensor, positions: Tensor, sampling: Sampling) -> Tensor:
        """What the coupled choice maximises, (B, M, V), for tokens at positions (B,); not normalised.

        That is log q for greedy rows and log q + G, with the target's own noise, for sampled ones.
        """
        if sampling.is_greedy:
            return logits.float()
        noisy = sampling.scores(logits, positions[:, None].expand(logits.shape[:2]))
        greedy = sampling.temperature == 0
        return torch.where(greedy[:, None, None], logits.float(), noisy) if bool(greedy.any()) else noisy

    def _ends(self, tokens: Tensor) -> Tensor:
        """Which tokens end an answer: nothing is drafted after them."""
        return torch.isin(tokens, self._stops)


class DraftModel(DraftReader):
    """Drafts a chain of up to `length` tokens with a language model.

    min_confidence: see the module docstring; 0 always drafts the whole length, and then no step waits for the device.
    is_drawn: sample the tokens and keep their rows, for a rejection verifier; else they are coupled to the target.
    Raises ValueError if the two models do not share a vocabulary.
    """

    def __init__(
        self, model: Target, target: Target, *, length: int = 5, min_confidence: float = 0.3, is_drawn: bool = False
    ) -> None:
        super().__init__(model, target, depth=length)
        if not 0 <= min_confidence < 1:
            raise ValueError(f"min_confidence must lie in [0, 1), where 0 never stops early, got {min_confidence}.")
        self.min_confidence, self.is_drawn = min_confidence, is_drawn

    def draft(self, state: DraftState, anchors: Tensor, lengths: Tensor, sampling: Sampling) -> TokenTree:
        opening = self._open(state, anchors, lengths)
        if opening is None:
            return TokenTree.root(anchors)
        at, alive, logits = opening.lengths, opening.alive, opening.logits
        confidence = torch.ones_like(logits[:, 0], dtype=torch.float32)
        tokens, valid, probs, sure = list[Tensor](), list[Tensor](), list[Tensor](), list[Tensor]()
        for step in range(self.depth):
            if self.is_drawn:
                scores = sampling.log_probs(logits[:, None])[:, 0]
                token = draw_next(scores, step, lengths=at, seeds=sampling.seeds)
                probs.append(scores.exp())
            else:
                scores = self._scores(logits[:, None], at + 1 + step, sampling)[:, 0]
                token = scores.max(dim=-1).indices  # several times faster than argmax on a CPU
            tokens.append(token)
            valid.append(alive)
            total = scores.logsumexp(dim=-1)
            sure.append((scores.amax(dim=-1) - total).exp())  # of the likeliest token, whichever was drawn
            if self.min_confidence > 0:
                confidence = confidence * (scores.gather(1, token[:, None])[:, 0] - total).exp()
            alive = alive & (confidence >= self.min_confidence) & ~self._ends(token)
            if step + 1 == self.depth or (self.min_confidence > 0 and not bool(alive.any())):
                break
            logits = self._read_next(state, token, opening, step)
        draft = torch.stack(tokens, dim=1)
        state.text[: len(at)].scatter_(1, at[:, None] + 1 + torch.arange(len(tokens), device=at.device), draft)
        rows_drawn_from = torch.stack(probs, dim=1) if probs else None
        real, likely = torch.stack(valid, dim=1), torch.stack(sure, dim=1)
        return TokenTree.chain(anchors, draft, valid=real, probs=rows_drawn_from, confidence=likely)

    def _read_next(self, state: DraftState, token: Tensor, opening: Opening, step: int) -> Tensor:
        """(B, V): logits after `token` (B,), number `step` of the draft."""
        tree, slot = TokenTree.root(self._known(token)), opening.lengths + 1 + step
        reading = self.model.verify(tree, slot, state.cache, longest=opening.longest + 1 + step)
        state.read[: len(slot)] = slot + 1
        return self._logits(reading.hidden[:, 0])


def check_vocabulary(model: Target, target: Target) -> None:
    """Raise ValueError unless every token id that both tokenizers know is the same token. Sizes may differ (padding)."""
    if model.tokenizer is target.tokenizer:
        return
    ours, theirs = model.tokenizer.get_vocab(), target.tokenizer.get_vocab()
    if ours == theirs:
        return
    here, there = ({token: text for text, token in vocabulary.items()} for vocabulary in (theirs, ours))
    shared = here.keys() & there.keys()
    differing = sorted(token for token in shared if here[token] != there[token])
    if differing or not shared:
        example = (
            f"id {differing[0]} is {there[differing[0]]!r} there and {here[differing[0]]!r} here"
            if differing
            else "none"
        )
        raise ValueError(
            f"draft model {model.name!r} cannot draft for target {target.name!r}: their tokenizers differ in {len(differing)} of "
            f"{len(shared)} shared ids ({example}), so its token ids would mean other text. Use a draft model of the "
            "target's own family, or train one on the target's tokenizer."
        )
