"""A sleep that frees the KV cache alone: vLLM's SleepModeBackend for a base that never moves."""

from __future__ import annotations

import torch
from vllm.device_allocator.cumem import CuMemAllocator, create_and_map, unmap_and_release
from vllm.device_allocator.sleep_mode_backend import SleepModeBackend

TAG = "kv_cache"  # vLLM's name for the allocations of the cache


class KvCacheSleep(SleepModeBackend):
    """Unmaps the cache's memory and maps fresh memory at the same addresses on waking."""

    def suspend(self, level: int = 1) -> None:
        torch.cuda.synchronize()  # nothing may still read the cache
        self._state = "SUSPENDED"
        for data in self._cache():
            if not data.is_asleep:
                unmap_and_release(data.handle)
                data.is_asleep = True
        torch.cuda.empty_cache()

    def resume(self, tags: list[str] | None = None) -> None:
        torch.cuda.empty_cache()  # what training left behind makes room for the cache
        for data in self._cache():
            if data.is_asleep:
                create_and_map(data.handle)
                data.is_asleep = False
        self._state = "RUNNING"

    def _cache(self):
        allocations = CuMemAllocator.get_instance().pointer_to_data.values()
        found = [data for data in allocations if data.tag == TAG]
        if not found:
            raise RuntimeError("no KV cache to put to sleep: was the engine built with sleep=True?")
        return found
