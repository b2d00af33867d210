"""Fixed scenarios that between them use every operation of the batch: quick, and the same every time."""

from random import Random

from tests.jaxrunner.batch.books import Driver
from tests.jaxrunner.batch.naive import Limits


def two_groups(driver_of: type[Driver] = Driver) -> Driver:
    """Chunks, decodes, drafts, preemption, return, condense, reorder and swaps, in two cache groups."""
    d = driver_of(Limits(block_sizes=(4, 8), kernel_block_sizes=(2, 8)))
    d.submit(prompt=9, params=1)
    d.submit(prompt=5, params=2)
    d.submit(prompt=12, params=3, chunk=5)
    d.step()
    d.submit(prompt=3, params=4, hit=1)
    d.wish(2, chunk=3)
    d.swap_in_step(1, 3)
    d.step()  # r3 is in its prompt still
    d.wish(0, drafts=[7, 8], accept=2)
    d.wish(1, drafts=[9], accept=1)
    d.wish(3, skip=True)
    d.step()
    d.preempt(0)  # with its drafts judged
    d.swap_in_step(0, 2)
    d.step()
    d.swap_now(0, 1)
    d.resume(0)
    d.wish(0, drafts=[3], accept=2)
    d.reorder(1)
    d.step()
    d.submit(prompt=4, params=1, like=0)  # the index and the row of whoever comes next
    d.submit(prompt=2, params=3, like=0)
    d.finish(0)
    d.step()
    d.wish(1, drop=1)
    d.wish(2, ahead=2)
    d.wish(0, elsewhere=True)
    d.step()
    d.wish(0, lose=True)
    d.preempt(2, resume=True)
    d.step()
    d.finish(1)
    d.step()  # the last row moves into the hole
    d.step()
    d.finish(0)
    d.finish(2)
    d.step()
    return d


def one_group(driver_of: type[Driver] = Driver) -> Driver:
    """Aborts and resubmissions of one id, restarts with outputs, tokens sent with a return, aborts between steps."""
    d = driver_of(Limits())
    d.submit(prompt=6, params=3)
    d.submit(prompt=8, params=1)
    d.submit(prompt=1, params=4)
    d.step()
    d.step()
    d.resubmit(1, prompt=10)
    d.step()
    d.resubmit(0, restart=True)
    d.step()
    d.preempt(0)
    d.preempt(1)
    d.step()
    d.resume(0, tokens=True)
    d.step()
    d.wish(0, drafts=[5, 6], accept=3)
    d.resume(0)
    d.step()
    d.abort_now(0, condense=True)
    d.abort_now(1, condense=True)  # the last row
    d.submit(prompt=5, params=1)
    d.submit(prompt=13, params=2)
    d.step()
    d.wish(1, drafts=[2], accept=1)
    d.step()
    d.preempt(1)  # an index with drafts is freed
    d.step()
    d.step()
    return d


def at_random(random: Random, steps: int, driver_of: type[Driver] = Driver) -> Driver:
    """A driver that has gone through so many steps of everything."""
    d = driver_of(random.choice((Limits(), Limits(block_sizes=(4, 8), kernel_block_sizes=(2, 8)))))
    for _ in range(steps):
        wish(d, random)
        wish(d, random)
        d.step()
    return d


def wish(d: Driver, random: Random) -> None:
    """Something for the next step."""
    one, n = random.randrange(6), random.randint(1, 3)
    match random.randrange(10):
        case 0 | 1:
            d.submit(random.randint(1, 12), params=one, hit=random.randrange(2), chunk=random.choice((99, 2)))
        case 2:
            d.submit(n, params=one, like=one)
        case 3:
            d.finish(one)
        case 4:
            d.resubmit(one, prompt=n, restart=random.random() < 0.5)
        case 5:
            d.preempt(one, resume=random.random() < 0.3)
        case 6:
            d.resume(one, tokens=random.random() < 0.5)
        case 7:
            d.wish(one, skip=True)
        case 8:
            d.wish(one, drafts=[7, 8][:n], accept=n)
        case 9:
            d.wish(one, **{random.choice(("chunk", "ahead", "drop", "elsewhere")): n})


SCENARIOS = (two_groups, one_group)
