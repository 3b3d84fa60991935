import { systemClock } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { receiveRequest, runTask } from "@kv/program";
import { type ProbeRequest, probeMemory } from "./memory-probe.js";

// NIXL may crash this process, and UCX hang in it; both may print.
await runTask(async () => {
  const request = await receiveRequest<ProbeRequest>();
  const transport = nixlTransport();
  try {
    return await probeMemory(transport, request, systemClock());
  } finally {
    await transport.close();
  }
});
