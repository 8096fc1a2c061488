# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from threading import Thread

from amphora_driver.render.cache import Memory, forget


def test_what_was_kept():
    memory: Memory[str] = Memory(10)
    assert memory.recall("a") is None
    assert memory.keep("a", "A") == "A"
    assert memory.recall("a") == "A"
    memory.clear()
    assert memory.recall("a") is None


def test_what_was_not_asked_for_longest_goes_first():
    memory: Memory[str] = Memory(10)
    memory.keep("a", "A", 4)
    memory.keep("b", "B", 4)
    memory.recall("a")
    memory.keep("c", "C", 4)
    assert [memory.recall(key) for key in "abc"] == ["A", None, "C"]


def test_weight_is_counted_once():
    memory: Memory[str] = Memory(10)
    for _ in range(20):
        memory.keep("a", "A", 5)
    memory.keep("b", "B", 5)
    assert [memory.recall(key) for key in "ab"] == ["A", "B"]


def test_something_too_heavy_is_kept_alone():
    memory: Memory[str] = Memory(10)
    memory.keep("a", "A")
    memory.keep("b", "B", 100)
    assert [memory.recall(key) for key in "ab"] == [None, "B"]


def test_forgetting_everything():
    memory: Memory[str] = Memory(10)
    memory.keep("a", "A")
    forget()
    assert memory.recall("a") is None


def test_threads():
    memory: Memory[int] = Memory(50)
    wrong = []

    def work() -> None:
        for number in range(5000):
            key = number % 80
            found = memory.recall(key)
            if found not in (None, key):
                wrong.append(found)
            memory.keep(key, key)

    threads = [Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert sum(memory.recall(key) is not None for key in range(80)) == 50
