"""Events, told by threads and heard by threads and coroutines."""

from __future__ import annotations

import asyncio
import threading

from tlcache.daemon.broadcast import KEPT, Broadcast


def test_events_are_numbered_and_kept_for_who_asks_later():
    events = Broadcast()
    for number in range(3):
        events.tell("x", number=number)
    assert [(one["id"], one["number"]) for one in events.recent()] == [(1, 0), (2, 1), (3, 2)]
    assert [one["id"] for one in events.recent(after=2)] == [3]
    with events.listen(after=1) as listener:
        assert [listener.get(0)["id"], listener.get(0)["id"]] == [2, 3]
        assert listener.get(0) is None


def test_a_listener_that_is_slow_loses_the_oldest_and_memory_is_bounded():
    events = Broadcast()
    with events.listen() as listener:
        for _ in range(KEPT + 10):
            events.tell("x")
        assert listener.get(0)["id"] == 11
    assert len(events.recent()) == KEPT


def test_coroutines_hear_what_threads_tell():
    events = Broadcast()

    async def hear():
        with events.listen() as listener:
            thread = threading.Thread(target=lambda: [events.tell("x") for _ in range(500)])
            thread.start()
            heard = [(await listener.next())["id"] for _ in range(500)]
            thread.join()
            return heard

    assert asyncio.run(hear()) == list(range(1, 501))


def test_who_waits_when_it_is_closed_gets_none():
    events = Broadcast()

    async def hear():
        listener = events.listen()
        task = asyncio.create_task(listener.next())
        await asyncio.sleep(0)
        listener.close()
        return await task

    assert asyncio.run(hear()) is None
    listener = events.listen()
    heard = []
    thread = threading.Thread(target=lambda: heard.append(listener.get()))
    thread.start()
    listener.close()
    thread.join(60)
    assert heard == [None]


def test_a_listener_whose_loop_has_ended_stops_nobody():
    events = Broadcast()

    async def leave():
        listener = events.listen()
        asyncio.create_task(listener.next())  # noqa: RUF006
        await asyncio.sleep(0)
        return listener

    listener = asyncio.run(leave())
    events.tell("x")
    assert listener.get(0)["kind"] == "x"
