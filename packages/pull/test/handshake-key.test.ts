import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { encodeHandshakeRequest, encodeLeaseQuery } from "@kv/protocol";
import { createScenario } from "@kv/testing/scenarios/scenario";
import { memorySideChannel } from "@kv/transport-memory";
import { afterAll, describe, expect, it } from "vitest";

const folder = mkdtempSync(join(tmpdir(), "kv-key-"));
afterAll(() => rmSync(folder, { recursive: true }));
let files = 0;
const keyFile = (...keys: string[]) => {
  files += 1;
  const path = join(folder, `${files}`);
  writeFileSync(path, keys.join("\n"));
  return path;
};
const [OLD, NEW] = ["the old key of this test", "the new key of this test"] as const;
const withKey = (file: string) => ({ extra: { handshake_key_file: file } });

describe("with handshake_key_file", () => {
  it("engines with the key serve each other, and plain messages act on nothing", async () => {
    await using play = createScenario();
    const file = keyFile(NEW);
    const p = await play.engine("p", withKey(file));
    const d = await play.engine("d", withKey(file));
    expect(await play.handedOver(p, d)).toBe("ok");
    await play.clock.advance(100_000);
    expect(await play.handedOver(p, d, 2)).toBe("ok");
  });

  it("a stranger gets neither metadata nor a lease, and is told why", async () => {
    await using play = createScenario();
    const p = await play.engine("p", withKey(keyFile(NEW)));
    const params = await play.prefilled(p);
    const stranger = memorySideChannel({ network: play.network, host: "stranger" });
    const { generation, capability } = params.kv_peer as { generation: number; capability: string };
    for (const frame of [
      encodeHandshakeRequest({ ppRank: 0, tpRank: 0 }),
      encodeLeaseQuery({
        engineId: "p",
        requestId: "r1",
        generation,
        capability,
        blocks: "0".repeat(64),
      }),
      new Uint8Array(40),
    ]) {
      const asked = stranger.request({
        host: "p",
        port: p.address.port,
        frames: [frame],
        timeoutMs: 1000,
      });
      await expect(play.clock.settle(asked)).rejects.toMatchObject({
        code: "KV_HANDSHAKE_UNTRUSTED",
        hint: expect.stringContaining("handshake_key_file"),
      });
    }
    await stranger.close();
  });

  it("the key changes on one worker after the other, without a restart", async () => {
    await using play = createScenario();
    const [ofP, ofD] = [keyFile(OLD), keyFile(OLD)];
    const p = await play.engine("p", withKey(ofP));
    const d = await play.engine("d", { extra: { ...withKey(ofD).extra, engine_ttl: 1 } });
    let n = 0;
    const served = async () => {
      n += 1;
      // Long enough for the link to be closed and for the files to be looked at.
      await play.clock.advance(70_000);
      expect(await play.handedOver(p, d, n)).toBe("ok");
    };
    await served();
    for (const [file, keys] of [
      [ofP, [OLD, NEW]],
      [ofD, [NEW, OLD]],
      [ofP, [NEW]],
      [ofD, [NEW]],
    ] as const) {
      writeFileSync(file, keys.join("\n"));
      await served();
    }
    writeFileSync(ofD, OLD);
    await play.clock.advance(70_000);
    expect(await play.handedOver(p, d, n + 1)).toBe("KV_HANDSHAKE_UNTRUSTED");
  });
});
