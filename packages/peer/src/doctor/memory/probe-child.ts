import { systemClock } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { receiveRequest, runTask } from "@kv/program";
import { type ProbeRequest, probeMemory } from "./memory-probe.js";

// The child process that reads a server's memory. NIXL may crash it, UCX may hang in it, and both
// may print to its output.
await runTask(async () => {
  const request = await receiveRequest<ProbeRequest>();
  const transport = nixlTransport();
  try {
    return await probeMemory(transport, request, systemClock());
  } finally {
    await transport.close();
  }
});
