import { type FrontFault, startFaultyFront } from "@kv/testing/http/faulty-front";
import { beforeAll, describe, expect, test } from "vitest";
import { verifyPair } from "../../packages/peer/test/run-kv-peer.js";
import { plain } from "./completion.js";
import { openProxy } from "./proxy-pair.js";
import { vllmServers } from "./server.js";
import { prompt } from "./tiny-peer.js";
import { handshakeTimedOut, retryAfterTimeout } from "./until.js";

// kv-peer verify against vLLM 0.33: a good pair behind kv-proxy and behind a plain proxy, pairs
// that recompute or leak, and a pair on TCP within one host.

const LEASE_SECONDS = 120;
/** Blocks of 32 tokens: 17 for each prompt of 512. */
const BLOCKS = 400;

describe.each([
  { mode: "pull", tls: "all", moved: "READ by D" },
  { mode: "push", tls: "all", moved: "WRITTEN by P" },
  { mode: "pull", tls: "tcp,self", moved: "READ by D" },
] as const)("kv-peer verify: vLLM 0.33, $mode, UCX_TLS=$tls", ({ mode, tls, moved }) => {
  const servers = vllmServers({
    kind: { version: "0.33", mode },
    blocks: BLOCKS,
    leaseSeconds: LEASE_SECONDS,
    env: { UCX_TLS: tls, UCX_NET_DEVICES: tls === "all" ? "all" : "lo", UCX_PROTO_INFO: "y" },
  });
  const urls = () => ({ prefill: servers.of("p").url, decode: servers.of("d").url });
  beforeAll(async () => {
    const [p, d] = await Promise.all([servers.start("p"), servers.start("d")]);
    await proxied((url) =>
      retryAfterTimeout(() => plain(url, prompt(40), 1), handshakeTimedOut(p, d)),
    );
  });

  async function closing<T>(
    front: { readonly url: string; close(): Promise<void> },
    work: (url: string) => Promise<T>,
  ): Promise<T> {
    try {
      return await work(front.url);
    } finally {
      await front.close();
    }
  }
  async function proxied<T>(work: (url: string) => Promise<T>): Promise<T> {
    const { prefill, decode } = urls();
    return closing(await openProxy({ prefillers: [prefill], decoders: [decode], mode }), work);
  }
  const through = async <T>(fault: FrontFault, work: (url: string) => Promise<T>) =>
    closing(await startFaultyFront(urls(), fault), work);
  async function verify(front: string) {
    const ended = await verifyPair(front, urls(), "--requests 3 --free-within 30s");
    console.info(ended.stdout, ended.verdict);
    return ended;
  }

  if (tls !== "all") {
    test("vllm#52607: TCP within one host fails with that name, and KV moves", async () => {
      const { code, stdout, verdict } = await proxied(verify);
      expect(stdout).toMatch(/^ok {4}KV moved .* 3 of 3 prompts: .* READ by D/m);
      expect({ code, verdict }).toEqual({ code: 1, verdict: "lane.tcp-on-one-host" });
    });
    return;
  }

  test("a good pair behind kv-proxy passes", async () => {
    const { code, stdout } = await proxied(verify);
    expect(stdout).toContain(moved);
    expect(stdout).toMatch(/^ok {4}KV moved .* 3 of 3 prompts: /m);
    expect(stdout).toMatch(/^ok {4}tokens .* 3 of 3 prompts have the answer of /m);
    expect(code).toBe(0);
  });

  test("kserve#5987: a D that computes each prompt itself fails as recomputed, though every answer is right", async () => {
    const { code, verdict } = await through("decode-alone", verify);
    expect({ code, verdict }).toEqual({ code: 1, verdict: "transfer.recomputed" });
  });

  test.runIf(mode === "pull")(
    "a plain proxy passes; one that repeats the prefill leg leaks",
    async () => {
      expect((await through("none", verify)).code).toBe(0);
      const { code, verdict } = await through("prefill-twice", verify);
      expect({ code, verdict }).toEqual({ code: 1, verdict: "blocks.prefill-leaked" });
    },
  );
});
