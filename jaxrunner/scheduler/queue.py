"""The requests that wait, first the one to be served next."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from jaxrunner.request import Request


class WaitingQueue:
    """Ordered by ``Request.order``, whatever order they are put in. No two requests have the same.

    Taking one out of the middle marks it only; it falls away when its turn comes.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._waiting: set[Request] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        """In order of service; for looking at, as it sorts them all."""
        return iter(sorted(self._waiting, key=lambda request: request.order))

    def push(self, request: Request) -> None:
        self._waiting.add(request)
        heapq.heappush(self._heap, (request.order, request))

    def head(self) -> Request:
        """The one to be served next; the queue must not be empty."""
        while self._heap[0][1] not in self._waiting:
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def pop(self) -> Request:
        """Takes the head out."""
        request = self.head()
        heapq.heappop(self._heap)
        self._waiting.remove(request)
        return request

    def remove(self, request: Request) -> None:
        self._waiting.remove(request)
