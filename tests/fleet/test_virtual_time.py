"""The virtual clock: jumps, order, deadlocks, and asyncio's own tools upon it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from fleet.virtual_time import Deadlock, HorizonReached, Process, outside, run, true_time


def test_a_day_of_sleep_takes_no_time() -> None:
    async def main() -> float:
        await asyncio.sleep(86_400.0 * 3)
        return asyncio.get_running_loop().time()

    assert run(main(), start=10.0) == 10.0 + 86_400.0 * 3


def test_equal_timers_fire_in_the_order_they_were_made() -> None:
    async def main() -> list[int]:
        seen: list[int] = []
        loop = asyncio.get_running_loop()
        for i in range(1000):
            loop.call_at(5.0 if i % 2 else 5.0 - i, seen.append, i)
        await asyncio.sleep(10)
        return seen

    even = [i for i in range(998, -1, -2) if 5.0 - i <= 0.0]
    seen = run(main())
    assert [i for i in seen if i % 2] == list(range(1, 1000, 2))
    assert [i for i in seen if not i % 2 and 5.0 - i <= 0.0] == even


def test_time_is_exact_far_from_zero() -> None:
    """At 1e9 s the resolution of a float is coarser than that of asyncio's usual clock."""

    async def main() -> float:
        await asyncio.sleep(0.25)
        await asyncio.sleep(1e-12)
        return asyncio.get_running_loop().time()

    assert run(main(), start=1e9) == 1e9 + 0.25


def test_timeouts_queues_events_and_groups_work() -> None:
    async def main() -> list[str]:
        said: list[str] = []
        queue: asyncio.Queue[int] = asyncio.Queue(1)
        gate = asyncio.Event()
        clock = asyncio.get_running_loop().time

        async def produce() -> None:
            for i in range(3):
                await asyncio.sleep(1)
                await queue.put(i)
            gate.set()

        async def consume() -> None:
            for _ in range(3):
                said.append(f"{await queue.get()}@{clock():g}")

        async with asyncio.TaskGroup() as group:
            group.create_task(produce())
            group.create_task(consume())
            await gate.wait()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.Event().wait()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 2)
        said.append(f"end@{clock():g}")
        return said

    assert run(main()) == ["0@1", "1@2", "2@3", "end@10"]


def test_a_deadlock_names_who_waits_and_where() -> None:
    async def stuck_for_ever() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        await asyncio.sleep(3)
        await asyncio.create_task(stuck_for_ever(), name="the-stuck-one")

    says = r"(?s)at 3\.0+ s.*the-stuck-one: .*stuck_for_ever.*test_virtual_time\.py:\d+.* > Event\.wait"
    with pytest.raises(Deadlock, match=says):
        run(main())


def test_a_cancelled_timer_does_not_hide_a_deadlock() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_later(100, print).cancel()
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match=r"at 0\.0+ s"):
        run(main())


def test_polling_without_sleep_is_a_deadlock_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet.virtual_time._SPIN_LIMIT", 1000)

    async def main() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(Deadlock, match="polls"):
        run(main())


def test_the_horizon_ends_an_endless_run() -> None:
    async def main() -> None:
        while True:
            await asyncio.sleep(1)

    with pytest.raises(HorizonReached, match=r"not ended by 107\.5"):
        run(main(), start=100.0, horizon_s=7.5)


def test_threads_run_inline_and_their_errors_come_back() -> None:
    def fail() -> None:
        raise KeyError("inside")

    async def main() -> int:
        with pytest.raises(KeyError, match="inside"):
            await asyncio.to_thread(fail)
        return await asyncio.to_thread(sum, [1, 2, 3])

    assert run(main()) == 6


def test_call_soon_threadsafe_wakes() -> None:
    async def main() -> None:
        gate = asyncio.Event()
        asyncio.get_running_loop().call_soon_threadsafe(gate.set)
        await gate.wait()

    run(main())


def test_a_group_cancels_its_tasks_in_the_same_order_each_time() -> None:
    """asyncio keeps a group's tasks in a set, ordered by address unless tasks hash otherwise."""

    def once(ballast: int) -> list[int]:
        keep = [object() for _ in range(ballast)]

        async def main() -> list[int]:
            ended: list[int] = []

            async def member(i: int) -> None:
                try:
                    await asyncio.sleep(1000)
                finally:
                    ended.append(i)

            async def fail() -> None:
                await asyncio.sleep(1)
                raise ValueError

            async def family() -> None:
                async with asyncio.TaskGroup() as group:
                    for i in range(100):
                        group.create_task(member(i))
                    group.create_task(fail())

            with pytest.raises(ExceptionGroup):
                await family()
            return ended

        ended = run(main())
        assert len(keep) == ballast
        return ended

    orders = {tuple(once(ballast)) for ballast in (0, 7, 1234, 99)}
    assert len(orders) == 1
    assert sorted(orders.pop()) == list(range(100))


def test_timeouts_that_never_fire_do_not_pile_up() -> None:
    async def main() -> int:
        for _ in range(20_000):
            async with asyncio.timeout(1e6):
                await asyncio.sleep(0.001)
        return len(asyncio.get_running_loop()._timers)  # type: ignore[attr-defined]

    assert run(main()) < 3000


def test_the_same_program_takes_the_same_steps() -> None:
    def trace() -> list[tuple[float, int]]:
        async def main() -> list[tuple[float, int]]:
            steps: list[tuple[float, int]] = []
            clock: Callable[[], float] = asyncio.get_running_loop().time

            async def walk(i: int) -> None:
                for k in range(20):
                    await asyncio.sleep((i * 7 + k * 3) % 5 * 0.1)
                    steps.append((clock(), i))

            await asyncio.gather(*(walk(i) for i in range(50)))
            return steps

        return run(main())

    before = time.monotonic()
    assert trace() == trace()
    assert time.monotonic() >= before  # the real clock is not touched


def test_a_stopped_process_runs_nothing_and_all_of_it_later_in_order() -> None:
    async def main() -> None:
        one, other = Process("one"), Process("other")
        said: list[tuple[str, int, float]] = []

        async def count(name: str) -> None:
            for i in range(4):
                said.append((name, i, asyncio.get_running_loop().time()))
                await asyncio.sleep(1)

        async def with_child(name: str) -> None:
            await asyncio.create_task(count(name))

        tasks = [one.start(with_child("one")), other.start(count("other"))]
        await asyncio.sleep(1.5)
        one.stop()
        assert one.stopped
        assert len(one.tasks()) == 2
        await asyncio.sleep(10)
        assert [entry[0] for entry in said].count("one") == 2
        one.resume()
        await asyncio.gather(*tasks)
        assert [at for name, _, at in said if name == "other"] == [0, 1, 2, 3]
        assert [at for name, _, at in said if name == "one"] == [0, 1, 11.5, 12.5]
        assert not one.tasks()

    run(main())


def test_processes_have_clocks_of_their_own_and_networks_the_true_one() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        ahead, behind = Process("ahead", 61.7), Process("behind", -1e6 / 3)
        arrived: list[float] = []

        async def work(offset: float) -> None:
            began = loop.time()
            assert began == pytest.approx(true_time() + offset)
            for wait in (0.1, 1 / 3, 7e-5):
                until = loop.time() + wait
                async with asyncio.timeout_at(until + 1):
                    await asyncio.sleep(wait)
                assert until <= loop.time() < until + 1e-6, "a timer is never early on its own clock"
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(2.0):
                    await asyncio.sleep(100)
            outside(loop.call_later, 5.0, lambda: arrived.append(loop.time()))

        first, second = ahead.start(work(61.7)), behind.start(work(-1e6 / 3))
        await asyncio.gather(first, second)
        ahead.stop()
        sent = loop.time()
        await asyncio.sleep(10)
        assert arrived == pytest.approx([sent + 5.0] * 2, abs=1e-3)

    run(main())
