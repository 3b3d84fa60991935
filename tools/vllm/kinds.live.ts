import { existsSync } from "node:fs";
import { join } from "node:path";
import { nixlTransport } from "@kv/nixl";
import { EngineServer, record } from "@kv/peer";
import { zmqSideChannel } from "@kv/side-channel";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { plain } from "./completion.js";
import { servedRecording } from "./served-recording.js";
import { PEER_DIR, recordingFolder, type VllmServer, vllmServers } from "./server.js";
import { tapTransport } from "./tapped-transport.js";
import { prompt } from "./tiny-peer.js";

// Other kinds of KV cache than the tiny Qwen3's, each with a tiny model of `make_kind_models.py`.
// vLLM 0.33 does not serve the hybrid model on the CPU. The test records the KV that a vLLM server
// computed and serves it back to that server.

interface Kind {
  readonly name: string;
  readonly tp: number;
  readonly args?: readonly string[];
}

const KINDS: readonly Kind[] = [
  { name: "one-head", tp: 2 },
  { name: "window", tp: 1 },
  { name: "mla", tp: 1, args: ["--block-size", "16"] },
];
const PROMPT = prompt(100);
const OUTPUT_TOKENS = 16;
/**
 * A block holds one layer of each group, so a model with several groups needs several times as many
 * blocks.
 */
const BLOCKS = 400;
const TIMEOUT_MS = 60_000;
const EXPONENT_BYTE = 3;
const EXPONENT_BIT = 0x40;

for (const { name, tp, args = [] } of KINDS) {
  describe(`tiny-${name}`, () => {
    let server: VllmServer;
    const sideChannel = zmqSideChannel();
    const transport = tapTransport(nixlTransport());
    const { start } = vllmServers({
      kind: { version: "0.33", mode: "pull" },
      tp,
      blocks: BLOCKS,
      args: ["--model", `tiny-${name}`, "--enable-prefix-caching", ...args],
    });
    beforeAll(async () => {
      server = await start(name);
    });
    afterAll(async () => {
      await sideChannel.close();
      await transport.transport.close();
    });

    test("recorded KV served back to vLLM gives the tokens of a local prefill; damaged KV gives other tokens", async () => {
      const engine = new EngineServer(server.url, { timeoutMs: TIMEOUT_MS });
      await record({
        folder: recordingFolder(name),
        prefill: engine,
        transport: transport.transport,
        sideChannel,
        prompts: [PROMPT],
      });
      const alone = await plain(server.url, PROMPT, OUTPUT_TOKENS);
      expect(alone).toHaveLength(OUTPUT_TOKENS);
      const hits = await server.metric("vllm:prefix_cache_hits_total");
      const decoded = async (beforeDecode?: () => void) => {
        await using recorded = await servedRecording(recordingFolder(name), {
          transport: transport.transport,
          sideChannel,
          numBlocks: 64,
        });
        return await recorded.decodedBy(server, PROMPT, OUTPUT_TOKENS, beforeDecode);
      };
      expect(await decoded()).toEqual(alone);
      const damaged = await decoded(() => {
        for (const { bytes } of transport.memories.slice(-tp)) {
          for (let at = EXPONENT_BYTE; at < bytes.length; at += 4)
            bytes[at] = (bytes[at] ?? 0) ^ EXPONENT_BIT;
        }
      });
      expect(damaged).not.toEqual(alone);
      expect(await server.metric("vllm:prefix_cache_hits_total")).toBe(hits);
    });
  });
}

test("setup.sh has created every model", () => {
  for (const { name } of KINDS)
    expect(existsSync(join(PEER_DIR, `tiny-${name}`, "config.json"))).toBe(true);
});
