import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import type { SideChannel } from "@kv/interface";
import {
  decodeChallenge,
  decodeHandshakeRefusal,
  decodeSignedRequest,
  encodeHandshakeRequest,
  encodeLeaseQuery,
} from "@kv/protocol";
import { createScenario, prompt } from "@kv/testing/scenarios/scenario";
import { memorySideChannel } from "@kv/transport-memory";
import { afterAll, describe, expect, it } from "vitest";

const folder = mkdtempSync(join(tmpdir(), "kv-require-"));
afterAll(() => rmSync(folder, { recursive: true }));
let files = 0;
const keyFile = (...keys: string[]) => {
  files += 1;
  const path = join(folder, `${files}`);
  writeFileSync(path, keys.join("\n"));
  return path;
};
const [OLD, NEW] = ["the old key of this test", "the new key of this test"] as const;
const requiring = (file: string) => ({
  extra: { handshake_key_file: file, handshake_key_require: true },
});
const ask = (sideChannel: SideChannel, frames: readonly Uint8Array[], port: number) =>
  sideChannel.request({ host: "p", port, frames, timeoutMs: 1000 });

describe("with handshake_key_require", () => {
  it("engines with the key serve each other, and plain messages act on nothing", async () => {
    const play = createScenario();
    const file = keyFile(NEW);
    const p = await play.engine("p", requiring(file));
    const d = await play.engine("d", requiring(file));
    expect(await play.handedOver(p, d)).toBe("ok");
    await play.clock.advance(100_000);
    expect(await play.handedOver(p, d, 2)).toBe("ok");
    await play.end();
  });

  it("a stranger gets a challenge, and neither metadata nor a lease", async () => {
    const play = createScenario();
    const p = await play.engine("p", requiring(keyFile(NEW)));
    const params = await play.clock.settle(p.prefill(prompt(1)));
    const stranger = memorySideChannel({ network: play.network, host: "stranger" });
    const { generation, capability } = params.kv_peer as { generation: number; capability: string };
    const messages = [
      encodeHandshakeRequest({ ppRank: 0, tpRank: 0 }),
      encodeLeaseQuery({ engineId: "p", requestId: "r1", generation, capability, blocks: "0".repeat(64) }),
      new Uint8Array(40),
    ];
    for (const message of messages) {
      const { frames } = await play.clock.settle(ask(stranger, [message], p.address.port));
      expect(frames).toHaveLength(1);
      expect(frames[0]?.byteLength).toBeLessThan(200);
      expect(decodeChallenge(frames)).toHaveLength(32);
      expect(decodeHandshakeRefusal(frames)).toMatch("handshake_key_file");
    }
    await stranger.close();
    await play.end();
  });

  it("a signed message counts once, and only for a minute", async () => {
    const play = createScenario();
    const file = keyFile(NEW);
    const p = await play.engine("p", requiring(file));
    const own = memorySideChannel({ network: play.network, host: "d" });
    const signed: Uint8Array[] = [];
    const d = await play.engine("d", {
      ...requiring(file),
      sideChannel: {
        ...own,
        request(options) {
          const [frame] = options.frames;
          if (frame !== undefined && decodeSignedRequest(options.frames) !== undefined) signed.push(frame);
          return own.request(options);
        },
        listen: (options) => own.listen({ ...options, host: "d" }),
      },
    });
    expect(await play.handedOver(p, d)).toBe("ok");
    // The handshake and the lease query.
    expect(signed).toHaveLength(2);
    const stranger = memorySideChannel({ network: play.network, host: "stranger" });
    for (const frame of signed) {
      const { frames } = await play.clock.settle(ask(stranger, [frame], p.address.port));
      expect(decodeHandshakeRefusal(frames)).toMatch("it was sent before");
    }
    await play.clock.advance(60_000);
    const { frames } = await play.clock.settle(ask(stranger, signed.slice(0, 1), p.address.port));
    expect(decodeChallenge(frames)).toHaveLength(32);
    await stranger.close();
    await play.end();
  });

  it.each([
    ["another key", { handshake_key_file: keyFile(OLD), handshake_key_require: true }],
    ["no key", {}],
    ["the key without the requirement", { handshake_key_file: keyFile(NEW) }],
  ])("a prefill worker with %s is refused", async (_, extra) => {
    const play = createScenario();
    const p = await play.engine("p", { extra });
    const d = await play.engine("d", requiring(keyFile(NEW)));
    expect(await play.handedOver(p, d)).toBe("KV_HANDSHAKE_UNTRUSTED");
    await play.end();
  });

  it("a decode worker that has the key and does not require it is served", async () => {
    const play = createScenario();
    const p = await play.engine("p", requiring(keyFile(NEW)));
    const d = await play.engine("d", { extra: { handshake_key_file: keyFile(NEW) } });
    expect(await play.handedOver(p, d)).toBe("ok");
    await play.end();
  });

  it("the key changes on one worker after the other, without a restart", async () => {
    const play = createScenario();
    const [ofP, ofD] = [keyFile(OLD), keyFile(OLD)];
    const p = await play.engine("p", requiring(ofP));
    const d = await play.engine("d", { extra: { ...requiring(ofD).extra, engine_ttl: 1 } });
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
    await play.end();
  });
});
