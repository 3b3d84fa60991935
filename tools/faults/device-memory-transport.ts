import type { Memory, Transport } from "@kv/interface";
import { deviceMemory } from "@kv/nixl";

/**
 * A NIXL transport whose `allocate` returns device memory, for an engine that keeps its cache
 * there. For the fake NIXL it is ordinary memory. `data` gives the engine's model access to the
 * bytes; the connector has no access.
 */
export function deviceMemoryTransport(transport: Transport, deviceId: number): Transport {
  const handles = new WeakMap<Memory, Memory>();
  return {
    ...transport,
    allocate(lengthBytes) {
      const backing = transport.allocate(lengthBytes);
      const handle = deviceMemory({
        address: backing.address,
        lengthBytes,
        deviceId,
        check: "none",
      });
      const memory = {
        ...handle,
        data: backing.bytes,
        close() {
          handle.close();
          backing.close();
        },
      };
      handles.set(memory, handle);
      return memory;
    },
    async createAgent(options) {
      const agent = await transport.createAgent(options);
      return { ...agent, register: (memory) => agent.register(handles.get(memory) ?? memory) };
    },
  };
}
