// A long suite: two processes over LIBFABRIC; two-processes.test.ts has them over UCX.
import { nixlTransport } from "@kv/nixl";
import { describe, expect, test } from "vitest";
import { libfabricMissing } from "../support/libfabric-available.js";
import { startPeer } from "../support/peer-process.js";
import { refused } from "../support/refused.js";
import { twoProcessTests } from "./two-processes.js";

twoProcessTests("LIBFABRIC", libfabricMissing);

// Over UCX, NIXL reports a peer's death, and transfers with it fail.
describe.skipIf(libfabricMissing)(
  `a dead peer over LIBFABRIC (${libfabricMissing ?? "found"})`,
  () => {
    test("is refused by addRemote, where NIXL would try to reach it for ever", async () => {
      const transport = nixlTransport({ backends: ["LIBFABRIC"] });
      const agent = await transport.createAgent();
      const start = (seed: number) => startPeer(1 << 20, seed, { backends: ["LIBFABRIC"] });
      const [gone, alive] = await Promise.all([start(1), start(2)]);
      await gone.kill();
      const { message } = await refused(
        agent.addRemote(gone.metadata),
        "KV_AGENT_METADATA_INVALID",
      );
      expect(message).toContain("its process is gone");
      expect(await agent.addRemote(alive.metadata)).toBe(alive.name);
      await transport.close();
      expect(await alive.end()).toBe(0);
    });
  },
);
