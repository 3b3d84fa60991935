import { type Agent, KvError } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { libfabricMissing } from "./libfabric-here.js";
import { mutations } from "./mutations.js";
import { type Owner, startOwner } from "./owner-process.js";
import { nixlMissing } from "./require-nixl.js";
import { runChild } from "./run-child.js";

describe.skipIf(nixlMissing)(`metadata tried in another process (${nixlMissing ?? "found"})`, () => {
  const transport = nixlTransport({ checkMetadata: true });
  let owner: Owner;
  let agent: Agent;

  beforeAll(async () => {
    owner = await startOwner(1 << 20);
    agent = await transport.createAgent();
  });
  afterAll(async () => {
    await transport.close();
    await owner?.end();
  });

  test("sound metadata is loaded, again without another check", async () => {
    expect(await agent.addRemote(owner.metadata)).toBe(owner.name);
    expect(await agent.addRemote(owner.metadata)).toBe(owner.name);
    await agent.removeRemote(owner.name);
  });

  test("bytes that end a process within NIXL end the other one; this one goes on", async () => {
    const address = Buffer.from(owner.metadata).indexOf("UCX|c") + "UCX|c".length + 8;
    const deadly = Uint8Array.from(owner.metadata, (byte, at) => (at === address ? byte ^ 0xff : byte));
    await expect(agent.addRemote(deadly)).rejects.toMatchObject({
      code: "KV_AGENT_METADATA_INVALID",
      message: expect.stringMatching(/^loading the metadata ends a process with SIG/),
    });
    expect(await agent.addRemote(owner.metadata)).toBe(owner.name);
  });

  test("a process that waits for a check alone waits for it", { timeout: 240_000 }, async () => {
    const end = await runChild("checking.ts", []);
    expect(end, end.stderr).toMatchObject({ code: 0, stdout: "added" });
  });

  test.skipIf(libfabricMissing)(
    `agents of one transport with unlike backends take each their peers (${libfabricMissing ?? "LIBFABRIC found"})`,
    async () => {
      const backends = [{ name: "LIBFABRIC" }];
      const [other, peer] = [
        await transport.createAgent({ backends }),
        await transport.createAgent({ backends }),
      ];
      expect(await other.addRemote(await peer.localMetadata())).toBe(peer.name);
      expect(await agent.addRemote(owner.metadata)).toBe(owner.name);
    },
  );

  test("whatever is damaged, the answer is a name or an error", { timeout: 14_400_000 }, async () => {
    const count = Number(process.env.KV_CHECKED_MUTATIONS ?? 150);
    let refused = 0;
    for (const bytes of mutations(owner.metadata, count, 7)) {
      try {
        await agent.removeRemote(await agent.addRemote(bytes));
      } catch (error) {
        expect(KvError.is(error, "KV_AGENT_METADATA_INVALID"), String(error)).toBe(true);
        refused++;
      }
    }
    expect(refused).toBeGreaterThan(count / 2);
  });
});
