import { cpuPlatform, readTransferConfig } from "@kv/connector";
import { engineIdentity } from "@kv/testing/engine-identity";
import {
  memoryNetwork,
  memorySideChannel,
  memoryTransport,
  virtualClock,
} from "@kv/transport-memory";
import { expect, test } from "vitest";
import { createPullWorker } from "./worker.js";

const workerOn = (bufferDevice: string, { role = "kv_both", ppSize = 1 } = {}) => {
  const clock = virtualClock();
  const network = memoryNetwork({ clock });
  return () =>
    createPullWorker({
      config: readTransferConfig({
        kv_connector: "pull",
        kv_role: role,
        kv_buffer_device: bufferDevice,
      }),
      engine: engineIdentity("e", { ppSize, isHmaEnabled: true }),
      tpRank: 0,
      ppRank: 0,
      transport: memoryTransport({ network }),
      platform: cpuPlatform(),
      sideChannel: memorySideChannel({ network }),
      clock,
    });
};

test("refuses a kv_buffer_device that the platform does not support, and names both", () => {
  expect(workerOn("cpu")).not.toThrow();
  expect(workerOn("cuda")).toThrow(expect.objectContaining({ code: "KV_PLATFORM_UNSUPPORTED" }));
  expect(workerOn("cuda")).toThrow('kv_buffer_device is "cuda"; platform cpu has cpu');
});

test("a decode worker with pipeline stages is refused when it is created, as in vLLM; a prefill worker is not", () => {
  expect(workerOn("cpu", { role: "kv_producer", ppSize: 2 })).not.toThrow();
  expect(workerOn("cpu", { role: "kv_consumer", ppSize: 2 })).toThrow(
    expect.objectContaining({ code: "KV_CONFIG_INVALID" }),
  );
});
