"""Slots that follow a weight."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.inference.client import AsyncSemWithAdaptiveWeight


@given(
    size=st.integers(1, 12),
    weights=st.lists(st.floats(0, 1), min_size=1, max_size=6),
    tasks=st.integers(1, 40),
)
def test_never_more_holders_than_slots_and_everyone_gets_one(
    size: int, weights: list[float], tasks: int
) -> None:
    async def run() -> int:
        semaphore = AsyncSemWithAdaptiveWeight(size)
        done = 0

        async def hold() -> None:
            nonlocal done
            async with semaphore:
                assert semaphore.in_use <= size
                await asyncio.sleep(0)
                done += 1

        running = [asyncio.create_task(hold()) for _ in range(tasks)]
        for weight in weights:
            await asyncio.sleep(0)
            semaphore.update_weight(weight)
        await asyncio.gather(*running)
        assert semaphore.in_use == 0
        return done

    assert asyncio.run(run()) == tasks


async def test_a_lower_weight_admits_fewer() -> None:
    semaphore = AsyncSemWithAdaptiveWeight(10)
    semaphore.update_weight(0.3)
    for _ in range(3):
        await semaphore.acquire()
    assert semaphore.locked()
    assert semaphore.free == 0
    semaphore.update_weight(1.0)
    assert not semaphore.locked()
    assert semaphore.free == 7


async def test_a_weight_of_nothing_still_lets_one_through() -> None:
    semaphore = AsyncSemWithAdaptiveWeight(4)
    semaphore.update_weight(0.0)
    await semaphore.acquire()
    assert semaphore.locked()


async def test_a_cancelled_waiter_gives_up_its_place() -> None:
    semaphore = AsyncSemWithAdaptiveWeight(1)
    await semaphore.acquire()
    first, second = (asyncio.create_task(semaphore.acquire()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    semaphore.release()
    assert await second
    assert semaphore.in_use == 1


async def test_a_waiter_cancelled_just_as_it_is_served_passes_the_slot_on() -> None:
    semaphore = AsyncSemWithAdaptiveWeight(1)
    await semaphore.acquire()
    first, second = (asyncio.create_task(semaphore.acquire()) for _ in range(2))
    await asyncio.sleep(0)
    semaphore.release()  # serves the first, which is cancelled before it runs
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert await asyncio.wait_for(second, 60)
