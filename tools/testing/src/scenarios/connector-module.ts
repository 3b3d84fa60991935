import {
  type ConnectorLoader,
  connectorRegistry,
  cpuPlatform,
  readTransferConfig,
} from "@kv/connector";
import type { ConnectorModule } from "@kv/interface";
import {
  memoryNetwork,
  memorySideChannel,
  memoryTransport,
  virtualClock,
} from "@kv/transport-memory";
import { expect, test } from "vitest";
import { engineIdentity } from "../engine-identity.js";

export function itIsFoundByItsNames(
  connector: ConnectorModule,
  names: readonly string[],
  register: (register: (name: string, loader: ConnectorLoader) => void) => void,
  load: () => Promise<unknown>,
): void {
  test("the connector is found by each of its names, and by its module path", async () => {
    const registry = connectorRegistry({ importModule: load });
    register((name, loader) => registry.register(name, loader));
    for (const name of names) expect(await registry.resolve({ connector: name })).toBe(connector);
    const byPath = { connector: "NixlConnector", modulePath: "@kv/one" };
    expect(await registry.resolve(byPath)).toBe(connector);
  });
}

export function itRefusesWhatDoesNotFit(connector: ConnectorModule): void {
  const create = async (change: object, ppSize = 1) => {
    const clock = virtualClock();
    const network = memoryNetwork({ clock });
    await connector.createWorker({
      config: readTransferConfig({ kv_connector: "x", kv_role: "kv_both", ...change }),
      engine: engineIdentity("e", { ppSize, isHmaEnabled: true }),
      tpRank: 0,
      ppRank: 0,
      transport: memoryTransport({ network }),
      platform: cpuPlatform(),
      sideChannel: memorySideChannel({ network }),
      clock,
    });
  };

  test("refuses a kv_buffer_device that the platform does not support, and names both", async () => {
    await create({ kv_buffer_device: "cpu" });
    await expect(create({ kv_buffer_device: "cuda" })).rejects.toMatchObject({
      code: "KV_PLATFORM_UNSUPPORTED",
      message: expect.stringContaining('kv_buffer_device is "cuda"; platform cpu has cpu'),
    });
  });

  test.each(["kv_producer", "kv_consumer", "kv_both"])(
    "a %s with pipeline stages: only a kv_consumer is refused when the worker is created, as in vLLM",
    async (kv_role) => {
      await create({ kv_role });
      const staged = create({ kv_role }, 2);
      if (kv_role !== "kv_consumer") await staged;
      else await expect(staged).rejects.toMatchObject({ code: "KV_CONFIG_INVALID" });
    },
  );
}
