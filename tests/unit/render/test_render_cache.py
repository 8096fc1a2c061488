# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from threading import Thread

from amphora_driver.bounded_cache import Cache


def test_cached_values_are_returned():
    memory: Cache[str] = Cache(10)
    assert memory.get("a") is None
    assert memory.put("a", "A") == "A"
    assert memory.get("a") == "A"
    memory.clear()
    assert memory.get("a") is None


def test_the_least_recently_used_entry_is_evicted():
    memory: Cache[str] = Cache(10)
    memory.put("a", "A", 4)
    memory.put("b", "B", 4)
    memory.get("a")
    memory.put("c", "C", 4)
    assert [memory.get(key) for key in "abc"] == ["A", None, "C"]


def test_weight_is_counted_once():
    memory: Cache[str] = Cache(10)
    for _ in range(20):
        memory.put("a", "A", 5)
    memory.put("b", "B", 5)
    assert [memory.get(key) for key in "ab"] == ["A", "B"]


def test_an_entry_above_the_limit_is_kept_alone():
    memory: Cache[str] = Cache(10)
    memory.put("a", "A")
    memory.put("b", "B", 100)
    assert [memory.get(key) for key in "ab"] == [None, "B"]


def test_clear_removes_all_entries():
    memory: Cache[str] = Cache(10)
    memory.put("a", "A")
    memory.clear()
    assert memory.get("a") is None


def test_threads_share_the_cache():
    memory: Cache[int] = Cache(50)
    wrong = []

    def work() -> None:
        for number in range(5000):
            key = number % 80
            found = memory.get(key)
            if found not in (None, key):
                wrong.append(found)
            memory.put(key, key)

    threads = [Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert sum(memory.get(key) is not None for key in range(80)) == 50
