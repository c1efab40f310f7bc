# SPDX-License-Identifier: Apache-2.0
"""A server with continuous batching: each step mixes chunks of new prompts with the next token of running requests."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import deque
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from model import Attend, Batch, Model, caches, paged, step

from ejkernel.modules import OutOfPagesError, PagePool, copy_pages


@dataclasses.dataclass(eq=False)
class Request:
    """A prompt and the tokens generated so far.

    Attributes:
        tokens: The prompt, and the generated tokens.
        prompt: Length of the prompt.
        limit: The largest number of tokens, including the prompt.
        stop: The token that ends the text.
        sequence: Its sequence in the pool; `None` while it waits.
    """

    tokens: list[int]
    prompt: int
    limit: int
    stop: int | None = None
    sequence: int | None = None

    @property
    def is_finished(self) -> bool:
        """Whether its text is complete."""
        generated = len(self.tokens) > self.prompt
        return len(self.tokens) >= self.limit or (generated and self.tokens[-1] == self.stop)


class Scheduled(NamedTuple):
    """A request in a step, its sequence in the pool, and the number of its new tokens."""

    request: Request
    sequence: int
    tokens: int


@dataclasses.dataclass
class Counts:
    """Counts of a server's requests, tokens and pages."""

    steps: int = 0
    generated: int = 0
    preempted: int = 0
    copied_pages: int = 0
    cache_bytes: int = 0
    seconds: float = 0.0


class Server:
    """Serves requests with one cache; the oldest running request is never preempted.

    Args:
        model, weights: The model.
        pages, page_size: The cache.
        slots: The largest number of running requests.
        chunk: The largest number of new tokens in a step.
        longest: The largest number of tokens of a request.
        attend: The attention.
    """

    def __init__(
        self,
        model: Model,
        weights: Any,
        *,
        pages: int,
        page_size: int = 16,
        slots: int = 8,
        chunk: int = 64,
        longest: int = 256,
        attend: Attend = paged,
    ) -> None:
        self.pool, self.counts = PagePool(pages, page_size), Counts()
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._weights, self._pages = weights, pages
        self._slots, self._chunk, self._longest = slots, chunk, longest
        self._caches = caches(model, pages, page_size)
        self._bytes_per_key = sum(cache[0, 0].nbytes for cache in self._caches)
        self._step = jax.jit(functools.partial(step, model, attend=attend), donate_argnums=1)

    def submit(self, prompt: list[int], limit: int, stop: int | None = None) -> Request:
        """Queue a prompt, to be continued to `limit` tokens or the token `stop`."""
        if not prompt or limit > self._longest or self.pool.pages_for(limit) > self._pages:
            raise ValueError(f"a prompt of {len(prompt)} tokens with limit={limit} never fits this server.")
        request = Request(list(prompt), len(prompt), limit, stop)
        self.waiting.append(request)
        return request

    def fork(self, request: Request, token: int) -> Request:
        """Return a request with the same text except for its last token; it shares the pages of the text."""
        tokens = [*request.tokens[:-1], token]
        forked = Request(tokens, len(tokens), request.limit, request.stop)
        if request.sequence is not None and len(self.running) < self._slots:
            forked.sequence = self.pool.fork(request.sequence)
            self.running.append(forked)
        else:
            self.waiting.append(forked)
        return forked

    def cancel(self, request: Request) -> None:
        """Stop a request."""
        if request.sequence is not None:
            self._release(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def run(self) -> None:
        """Step until all requests are finished."""
        while self.waiting or self.running:
            self.step()

    def step(self) -> list[Request]:
        """Run the model once, and return the requests that it finished."""
        begin = time.perf_counter()
        while self.waiting and len(self.running) < self._slots and self._has_room_for(self.waiting[0]):
            request = self.waiting.popleft()
            request.sequence = self.pool.allocate()
            self.running.append(request)
        chosen = self._scheduled()
        found, self._caches = self._step(self._weights, self._caches, self._batch(chosen))
        finished = []
        for (request, sequence, count), token in zip(chosen, np.asarray(found).tolist(), strict=False):
            self.counts.cache_bytes += self.pool.length(sequence) * self._bytes_per_key
            if not count or self.pool.length(sequence) < len(request.tokens):
                continue  # its prompt is not complete
            request.tokens.append(token)
            self.counts.generated += 1
            if request.is_finished:
                finished.append(request)
        for request in finished:
            self._release(request)
        self.counts.steps += 1
        self.counts.seconds += time.perf_counter() - begin
        return finished

    def _has_room_for(self, request: Request) -> bool:
        return not self.running or self.pool.pages_for(len(request.tokens) + 1) <= self.pool.free_pages

    def _scheduled(self) -> list[Scheduled]:
        """Return the requests of a step, oldest first; their sequences have the pages."""
        chosen: list[Scheduled] = []
        copies: list[tuple[int, int]] = []
        left = self._chunk
        for request in list(self.running):
            if request.sequence is None:  # preempted by an older one
                continue
            count = min(len(request.tokens) - self.pool.length(request.sequence), left)
            copies += self._extended(request, count)
            if request.sequence is not None:
                chosen.append(Scheduled(request, request.sequence, count))
                left -= count
        if copies:
            self.counts.copied_pages += len(copies)
            padded = [*copies, *[(0, -1)] * (self._slots - len(copies))]  # one shape for all steps
            sources, targets = jnp.asarray(padded, jnp.int32).T
            self._caches = [copy_pages(cache, sources, targets) for cache in self._caches]
        return chosen

    def _extended(self, request: Request, count: int) -> list[tuple[int, int]]:
        """Give a request pages for its new tokens, and return the pages to copy; the youngest requests make room."""
        while request.sequence is not None:
            try:
                return self.pool.extend(request.sequence, count)
            except OutOfPagesError:
                youngest = self.running[-1]
                self._release(youngest)
                self.waiting.appendleft(youngest)
                self.counts.preempted += 1
        return []

    def _release(self, request: Request) -> None:
        assert request.sequence is not None
        self.pool.free(request.sequence)
        request.sequence = None
        self.running.remove(request)

    def _batch(self, chosen: list[Scheduled]) -> Batch:
        """Return the arrays of a step, padded to one of two sizes."""
        columns, lengths = self.pool.pages_for(self._longest), np.zeros(self._slots, np.int32)
        table, offsets = np.zeros((self._slots, columns), np.int32), np.zeros(self._slots + 1, np.int32)
        new: list[int] = []
        positions: list[int] = []
        for row, (request, sequence, count) in enumerate(chosen):
            lengths[row] = end = self.pool.length(sequence)
            new += request.tokens[end - count : end]
            positions += range(end - count, end)
            offsets[row + 1 :] = len(new)
        table[: len(chosen)] = self.pool.table([each.sequence for each in chosen], columns=columns)
        size = self._slots if len(new) <= self._slots else self._chunk
        padding = [0] * (size - len(new))
        tokens, places = (np.asarray(x + padding, np.int32) for x in (new, positions))
        return Batch(tokens, places, table, offsets, lengths)
