import { KvError } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { FAKE_NIXL, fakeMissing } from "@kv/testing/nixl/fake-nixl";
import { describe, expect, test } from "vitest";
import { mutations } from "../support/mutations.js";

// Metadata that the addon accepts goes to a fake of NIXL, which checks nothing itself.
// `npm run test:long` tests a million mutations.
const COUNT = Number(process.env.KV_MUTATIONS ?? 4000);
const BATCH = 500;

describe.skipIf(fakeMissing)(`damaged metadata in this process (${fakeMissing ?? "found"})`, () => {
  test(`${COUNT} mutated blobs: each is refused with an error, or names a peer`, {
    timeout: 14_400_000,
  }, async () => {
    const transport = nixlTransport({ library: FAKE_NIXL });
    const [agent, peer] = [await transport.createAgent(), await transport.createAgent()];
    const memories = [1, 2, 3].map((pages) => transport.allocate(pages * 4096));
    for (const memory of memories) await peer.register(memory);
    const metadata = await peer.localMetadata();
    let [refused, named] = [0, 0];
    for (let seed = 0; refused + named < COUNT; seed++) {
      const batch = [...mutations(metadata, Math.min(BATCH, COUNT - refused - named), seed)];
      const outcomes = await Promise.all(
        batch.map((bytes) =>
          agent.addRemote(bytes).then(
            (name) => /^[\x20-\x7e]{1,255}$/.test(name),
            (error: unknown) =>
              KvError.is(error, "KV_AGENT_METADATA_INVALID") ? undefined : error,
          ),
        ),
      );
      for (const outcome of outcomes) {
        if (outcome === undefined) refused++;
        else {
          expect(outcome).toBe(true);
          named++;
        }
      }
    }
    expect(refused).toBeGreaterThan(COUNT / 3);
    expect(await agent.addRemote(metadata)).toBe(peer.name);
    await transport.close();
    for (const memory of memories) memory.close();
  });
});
