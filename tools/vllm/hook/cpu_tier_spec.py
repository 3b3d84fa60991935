"""vLLM 0.33's TieringOffloadingSpec for an engine on the CPU, for tests: vLLM's own worker takes GPU memory only.

kv_connector_extra_config: {"spec_name": "CpuTierSpec", "spec_module_path": "cpu_tier_spec", ...}"""
import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CpuWorker(OffloadingWorker):
    """Copies blocks between the engine's cache and the primary tier at once."""

    def __init__(self, caches, region):
        self.region = region
        self.groups = caches.group_data_refs
        self.engine = [each.tensor.view(torch.int8).view(-1, each.page_size_bytes) for each in caches.tensors]
        self.tier = [region.create_next_worker_view(each.page_size_bytes) for each in caches.tensors]
        self.finished = []

    def copy(self, job, engine_spec, tier_spec, store):
        at = moved = 0
        for size, refs in zip(engine_spec.group_sizes, self.groups):
            pairs = list(zip(engine_spec.block_ids[at:at + size], tier_spec.block_ids[at:at + size]))
            at += size
            for ref in refs:
                engine, tier, length = self.engine[ref.tensor_idx], self.tier[ref.tensor_idx], ref.page_size_bytes
                for block, chunk in pairs:
                    source, target = (engine[block], tier[chunk]) if store else (tier[chunk], engine[block])
                    target[:length] = source[:length]
                    moved += length
        self.finished.append(TransferResult(job_id=job, success=True, transfer_size=moved, transfer_time=1e-6))
        return True

    def submit_store(self, job_id, src_spec, dst_spec):
        return self.copy(job_id, src_spec, dst_spec, True)

    def submit_load(self, job_id, src_spec, dst_spec, expedited=False):
        return self.copy(job_id, dst_spec, src_spec, False)

    def get_finished(self):
        finished, self.finished = self.finished, []
        return finished

    def wait(self, job_ids):
        pass

    def shutdown(self):
        self.tier.clear()
        self.region.cleanup()


class CpuTierSpec(TieringOffloadingSpec):
    def get_worker(self, kv_caches):
        if self._worker is None:
            assert self.blocks_per_chunk == 1
            region = SharedOffloadRegion(
                engine_id=self._engine_id, num_chunks=self.num_chunks, rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk, cpu_page_size=self.cpu_page_size_per_worker)
            self._worker = CpuWorker(kv_caches, region)
        return self._worker
