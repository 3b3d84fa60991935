import type { Transport } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { loadFakeCuda } from "@kv/testing/nixl/fake-cuda";
import { FAKE_NIXL } from "@kv/testing/nixl/fake-nixl";

/**
 * The NIXL transport with stand-ins for NIXL and the CUDA driver, whose GPUs are host memory. Its
 * agents reach those of this process only.
 */
export default function transportWithGpus(): Transport {
  loadFakeCuda();
  const transport = nixlTransport({ library: FAKE_NIXL, backends: ["UCX"] });
  return {
    ...transport,
    capabilities: { ...transport.capabilities, crossProcess: false, memoryTypes: ["DRAM", "VRAM"] },
  };
}
