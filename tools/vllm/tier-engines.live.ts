import { spawn } from "node:child_process";
import { once } from "node:events";
import { fileURLToPath } from "node:url";
import { nixlTransport } from "@kv/nixl";
import { openPool } from "@kv/pool";
import { createProxy } from "@kv/proxy";
import { freePorts } from "@kv/testing/free-ports";
import { recordedLog } from "@kv/testing/recorded-log";
import { askNamespace } from "@kv/tier";
import { afterAll, expect, it, vi } from "vitest";
import { ask } from "./completion.js";
import { servePool } from "./serve-pool.js";
import { PEER_DIR } from "./server.js";

// Two vLLM servers on the CPU with OffloadingConnector and the P2P tier, and a pool between them.
// hook/cpu_tier_spec.py stands in for vLLM's worker, which takes GPU memory only.

const script = (name: string) => fileURLToPath(new URL(name, import.meta.url));
const PROMPT = Array.from({ length: 200 }, (_, at) => at + 1);

/** `tier`: OffloadingConnector alone; `p`: with NixlConnector beside it; `d`: NixlConnector. */
type Kind = "tier" | "p" | "d";

function connectorOf(kind: Kind, tierPort: number): readonly [name: string, extra: object] {
  const offloading = {
    spec_name: "CpuTierSpec",
    spec_module_path: "cpu_tier_spec",
    cpu_bytes_to_use: 2 ** 26,
    secondary_tiers: [{ type: "p2p", host: "127.0.0.1", port: tierPort }],
  };
  if (kind === "tier") return ["OffloadingConnector", offloading];
  if (kind === "d") return ["NixlConnector", {}];
  const connectors = [
    { kv_connector: "NixlConnector", kv_role: "kv_both", kv_buffer_device: "cpu" },
    {
      kv_connector: "OffloadingConnector",
      kv_role: "kv_both",
      kv_connector_extra_config: offloading,
    },
  ];
  return ["MultiConnector", { connectors }];
}

/** Started beside others; `stop` ends it. */
async function startServer(events: readonly number[], kind: Kind = "tier") {
  const [port = 0, side = 0, tier = 0] = await freePorts(3);
  const [connector, extra] = connectorOf(kind, tier);
  // vLLM binds wildcards only, and connects to other addresses.
  const [endpoint, replay] = events.map((each) => `tcp://*:${each}`);
  const published = {
    enable_kv_cache_events: true,
    publisher: "zmq",
    endpoint,
    replay_endpoint: replay,
  };
  const args = [port, side, connector, 64, 1, JSON.stringify(extra)];
  if (events.length > 0) args.push("--kv-events-config", JSON.stringify(published));
  args.push("--enable-prompt-tokens-details");
  // The guard ends the server when its stdin closes.
  const child = spawn(script("guard.sh"), [script("serve.sh"), ...args.map(String)], {
    detached: true,
    stdio: ["pipe", "ignore", "ignore"],
    env: { ...process.env, KV_PEER_DIR: PEER_DIR, PEER_VLLM: "0.33" },
  });
  const closed = once(child, "close");
  const url = `http://127.0.0.1:${port}`;
  return {
    url,
    side,
    peerId: `127.0.0.1:${tier}`,
    ready: () =>
      vi.waitFor(async () => expect((await fetch(`${url}/health`)).status).toBe(200), {
        timeout: 300_000,
        interval: 500,
      }),
    async stop(): Promise<void> {
      child.stdin.end();
      await closed;
    },
  };
}

type Server = Awaited<ReturnType<typeof startServer>>;
const servers: Server[] = [];
const transport = nixlTransport();
afterAll(async () => {
  await Promise.all(servers.map(({ stop }) => stop()));
  await transport.close();
});

/** A pool that copies what an engine publishes. */
async function poolOf({ peerId }: Server, events: readonly number[]) {
  const [endpoint = "", replayEndpoint] = events.map((each) => `tcp://127.0.0.1:${each}`);
  return openPool({
    transport,
    host: "127.0.0.1",
    port: 0,
    memoryBytes: 2 ** 26,
    engines: [{ peerId, events: { endpoint, replayEndpoint } }],
    ...(await askNamespace({ peerId, host: "127.0.0.1" })),
  });
}

/** What the model says, and how much of the prompt it did not compute. */
async function complete(url: string, given: object = {}) {
  const body = { model: "tiny", prompt: PROMPT, max_tokens: 8, temperature: 0, ...given };
  const answer = (await (await ask(`${url}/v1/completions`, body)).json()) as {
    readonly choices: readonly { readonly text: string }[];
    readonly usage: { readonly prompt_tokens_details?: { readonly cached_tokens: number } | null };
  };
  const cached = answer.usage.prompt_tokens_details?.cached_tokens ?? 0;
  return { text: answer.choices[0]?.text, cached };
}

it("A computes and ends; B takes A's blocks from the pool, and says the same", async () => {
  const events = await freePorts(2);
  const a = await startServer(events);
  const b = await startServer([]);
  servers.push(a, b);
  await Promise.all([a.ready(), b.ready()]);
  const pool = await poolOf(a, events);

  const alone = await complete(a.url);
  // A stores the prefix a second time, from its offloading tier. vLLM does not reset its cache while
  // the first time is still being offloaded, and answers as if it had.
  await vi.waitFor(
    async () => {
      await ask(`${a.url}/reset_prefix_cache`, {});
      await complete(a.url);
      expect(pool.status().copied).toBeGreaterThan(4);
    },
    { timeout: 60_000, interval: 1000 },
  );
  await a.stop();

  const [remote_host = "", port] = pool.localId.split(":");
  const remote_kv_source = { kv_request_id: "one", remote_host, remote_port: Number(port) };
  const answer = await complete(b.url, { kv_transfer_params: { remote_kv_source } });
  expect(answer).toEqual({ text: alone.text, cached: 192 });
  expect(pool.status().found).toBeGreaterThan(4);
  await pool.close();
});

it("kv-proxy hands a leaving P's KV to the pool, and a new P has it before it takes load", async () => {
  const events = await freePorts(2);
  const [p, d, other] = await Promise.all([
    startServer(events, "p"),
    startServer([], "d"),
    startServer([], "p"),
  ]);
  servers.push(p, d, other);
  await Promise.all([p.ready(), d.ready(), other.ready()]);
  const pool = await poolOf(p, events);
  const { admin, url: poolUrl } = await servePool(pool);
  const { log, logged } = recordedLog();
  const specOf = ({ url, side }: Server) => ({ url, kv: { host: "127.0.0.1", port: side } });
  const tierPort = Number(p.peerId.split(":")[1]);
  const proxy = createProxy({
    prefillers: [specOf(p)],
    decoders: [specOf(d)],
    kvSources: { pools: [poolUrl], tierPort },
    routing: { prefill: "prefix-aware" },
    log,
  });
  const { url } = await proxy.listen({ port: 0 });
  const { prefill } = proxy.instances;
  try {
    const first = await complete(url);
    await vi.waitFor(() => expect(pool.content("", 0).block_size).toBe(32), { timeout: 30_000 });
    await prefill.drain({ url: p.url });
    expect(pool.status().copied).toBeGreaterThan(4);
    await vi.waitFor(() => expect(proxy.status().kv_pools[0]?.unused).toBeNull(), {
      timeout: 30_000,
    });
    await p.stop();

    prefill.add(specOf(other));
    // It is the only P, and so takes load from the start.
    await vi.waitFor(() => expect(pool.status().found).toBeGreaterThan(4), { timeout: 60_000 });
    await vi.waitFor(() => expect(prefill.find(other)?.inFlight).toBe(0));
    expect((await complete(url)).text).toBe(first.text);
    // Of 200 tokens vLLM computes at least the last block's.
    expect(logged("request-done").at(-1)).toMatchObject({ prefill: other.url, cachedTokens: 192 });
  } finally {
    await proxy.close();
    await admin.close();
    await pool.close();
  }
});
