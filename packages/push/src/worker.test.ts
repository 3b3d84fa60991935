import { cpuPlatform, readTransferConfig } from "@kv/connector";
import { engineIdentity } from "@kv/testing/engine-identity";
import {
  memoryNetwork,
  memorySideChannel,
  memoryTransport,
  virtualClock,
} from "@kv/transport-memory";
import { expect, test } from "vitest";
import { createPushWorker } from "./worker.js";

test.each(["kv_producer", "kv_consumer", "kv_both"])(
  "a %s with pipeline stages: only a kv_consumer is refused when the worker is created",
  (role) => {
    const clock = virtualClock();
    const network = memoryNetwork({ clock });
    const worker = (ppSize: number) => () =>
      createPushWorker({
        config: readTransferConfig({ kv_connector: "push", kv_role: role }),
        engine: engineIdentity("e", { ppSize, isHmaEnabled: true }),
        tpRank: 0,
        ppRank: 0,
        transport: memoryTransport({ network }),
        platform: cpuPlatform(),
        sideChannel: memorySideChannel({ network }),
        clock,
      });
    expect(worker(1)).not.toThrow();
    if (role === "kv_consumer")
      expect(worker(2)).toThrow(expect.objectContaining({ code: "KV_CONFIG_INVALID" }));
    else expect(worker(2)).not.toThrow();
  },
);
