import { KvError, systemClock } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { type ProbeRequest, probeMemory } from "./memory-probe.js";
import type { ProbeReply } from "./probe-process.js";

// The entry of the child process that reads a server's memory. It receives one request over IPC and sends one reply. NIXL may crash it, UCX may
// hang in it, and both may print to its output.
async function run(request: ProbeRequest): Promise<ProbeReply> {
  const transport = nixlTransport();
  try {
    return { result: await probeMemory(transport, request, systemClock()) };
  } catch (thrown) {
    return { error: KvError.from(thrown, "KV_INTERNAL", "the probe failed").toJSON() };
  } finally {
    await transport.close();
  }
}

process.once("message", (request) => {
  void run(request as ProbeRequest).then((reply) => {
    process.send?.(reply);
    process.disconnect();
  });
});
