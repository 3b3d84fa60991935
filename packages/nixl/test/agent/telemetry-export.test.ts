import { once } from "node:events";
import { createServer } from "node:net";
import { nixlTransport } from "@kv/nixl";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { describe, expect, test } from "vitest";
import { listsOf } from "../support/pair.js";
import { scattered } from "../support/pattern.js";

const LENGTH = 65_536;

async function freePort(): Promise<number> {
  const server = createServer().listen(0, "127.0.0.1");
  await once(server, "listening");
  const { port } = server.address() as { port: number };
  server.close();
  return port;
}

describe.skipIf(nixlMissing)(`NIXL's telemetry (${nixlMissing ?? "found"})`, () => {
  test("is exported as the variables say", async () => {
    const port = await freePort();
    const env = {
      NIXL_TELEMETRY_ENABLE: "y",
      NIXL_TELEMETRY_EXPORTER: "prometheus",
      NIXL_TELEMETRY_PROMETHEUS_PORT: String(port),
      NIXL_TELEMETRY_PROMETHEUS_LOCAL: "y",
    };
    await using transport = nixlTransport({ backends: ["UCX"], env });
    const agent = await transport.createAgent();
    const memory = transport.allocate(LENGTH);
    await agent.register(memory);
    const { move } = await listsOf(agent, memory, agent.name, memory, LENGTH / 2, 2);
    await move("READ", scattered(1), { remoteIds: Int32Array.of(1) }).done;
    const received = async () => {
      const text = await (await fetch(`http://127.0.0.1:${port}/metrics`)).text();
      return Number(/^agent_rx_bytes_total\{[^}]*\} (\S+)$/m.exec(text)?.[1]);
    };
    await expect.poll(received, { timeout: 5000 }).toBe(LENGTH / 2);
  });
});
