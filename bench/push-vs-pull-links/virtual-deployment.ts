import { type LogFields, silentLog } from "@kv/interface";
import { createProxy } from "@kv/proxy";
import {
  memoryNetwork,
  memorySideChannel,
  memoryTransport,
  seededRandom,
  virtualClock,
} from "@kv/transport-memory";
import { planInstances, planProxy } from "../../apps/demo/src/cluster/cluster-plan.js";
import { startInstance } from "../../apps/demo/src/instance/instance.js";
import { readInstanceConfig } from "../../apps/demo/src/instance/instance-config.js";
import type { Way } from "../push-vs-pull/deployments.js";
import { BLOCK_TOKENS, type Point } from "../push-vs-pull/workload.js";
import { median } from "../report.js";
import { delayedLink, messageDelay } from "./delayed-link.js";
import { settledIo } from "./settled-io.js";

/** The hardware that a virtual deployment runs on, and its model. */
export interface World {
  /** Bytes that the link between P and D carries in a millisecond, in each direction. */
  readonly linkBytesPerMs: number;
  /** Time of a message between two processes: of HTTP, a notification or a question on the side channel; and until a transfer begins. */
  readonly hopMs: number;
  /** Time that each byte range of a transfer adds. */
  readonly rangeMs: number;
  readonly forwardMsPer512Tokens: number;
  readonly layers: number;
  readonly kvBytesPerToken: number;
  /** Processor time that a message takes, on one of the cores that all processes share. Default: 0. */
  readonly handlingMs?: number | undefined;
  readonly cores?: number | undefined;
}

/** Each virtual byte stands for many: a simulated layer of a token has 64 bytes. */
const SIMULATED = { layers: 4, kvHeads: 1, headDim: 8, maxModelLen: 8192 } as const;
const SIMULATED_BYTES_PER_TOKEN =
  SIMULATED.layers * SIMULATED.kvHeads * 2 * SIMULATED.headDim * Float32Array.BYTES_PER_ELEMENT;
const CACHE_TOKENS = 80_000;
const VOCABULARY = 1000;
/** A request that takes longer in virtual time has failed. */
const LIMIT_MS = 600_000;

/** The proxy, P and D of the demo in this process, over the embedded transport, on a virtual clock. */
export interface VirtualDeployment {
  /** Sends a point's requests at once. Returns the median time to the first token. Errors: those of the requests. */
  ttftMs(point: Point): Promise<number>;
  close(): Promise<void>;
}

export interface VirtualDeploymentOptions {
  /** The instance that has the part `hitPercent` of each prompt in its prefix cache. Default: decode. */
  readonly hitsAt?: "prefill" | "decode" | undefined;
  /** As `settledIo`. */
  readonly turns?: number | undefined;
}

export async function openVirtualDeployment(
  way: Way,
  pool: Point["pool"],
  world: World,
  { hitsAt = "decode", turns }: VirtualDeploymentOptions = {},
): Promise<VirtualDeployment> {
  const clock = virtualClock({ turn: settledIo(turns) });
  const scale = world.kvBytesPerToken / SIMULATED_BYTES_PER_TOKEN;
  const network = memoryNetwork({
    clock,
    random: seededRandom("links"),
    latency: {
      latencyMs: world.hopMs + (world.handlingMs ?? 0),
      bytesPerMs: world.linkBytesPerMs / scale,
      sharesBandwidth: true,
      rangeMs: (world.rangeMs * world.layers) / SIMULATED.layers,
      pieceLengthBytes: 16 * 1024,
    },
  });
  const failures: string[] = [];
  const log = {
    ...silentLog,
    error: (event: string, fields?: LogFields) => void failures.push(`${event} ${JSON.stringify(fields)}`),
  };
  const options = {
    transport: "memory",
    connector: way === "pull" ? "NixlConnector" : "push",
    pushLayerwise: way === "push, layer-wise",
    ...{ prefills: 1, decodes: 1, prefillTp: 1, decodeTp: 1 },
    ...{ prefillBlockSize: BLOCK_TOKENS, decodeBlockSize: BLOCK_TOKENS, cacheTokens: CACHE_TOKENS },
    instance: {
      simulate: { ...SIMULATED, forwardMsPer512Tokens: world.forwardMsPer512Tokens },
      fragmented: pool === "fragmented",
      digests: false,
    },
    // Without hits at P, it computes every prompt.
    prefillInstance: { prefixCaching: hitsAt === "prefill" },
  } as const;
  const planned = planInstances(options);
  const delay = messageDelay(clock, world);
  const closers: (() => Promise<unknown>)[] = [];
  const start = async ({ name, config }: (typeof planned.prefills)[number]) => {
    const instance = await startInstance(readInstanceConfig(config), {
      log,
      clock,
      transport: memoryTransport({ network, host: name }),
      sideChannel: memorySideChannel({ network, host: name }),
    });
    closers.push(() => instance.close());
    const link = await delayedLink(instance.url, clock, delay);
    closers.push(() => link.close());
    return link.url;
  };
  const prefills = await Promise.all(planned.prefills.map(start));
  const [prefill = ""] = prefills;
  const decodes = await Promise.all(planned.decodes.map(start));
  // Pairing reads side channels over TCP.
  const proxy = createProxy({
    ...planProxy(
      prefills.map((url) => ({ url })),
      decodes.map((url) => ({ url })),
      options,
    ),
    pairing: { mode: "off" },
    log,
    clock,
  });
  const { url: proxyUrl } = await proxy.listen({ port: 0 });
  closers.push(() => proxy.close({ graceMs: 0 }));
  const entry = await delayedLink(proxyUrl, clock, delay);
  closers.push(() => entry.close());

  let made = 0;
  /** No two prompts share a prefix. */
  const freshPrompt = (length: number): number[] => {
    made += 1;
    return Array.from({ length }, (_, i) => 3 + ((made * 7919 + i * 31 + ((made * i) % 13)) % VOCABULARY));
  };
  async function send(prompt: readonly number[], maxTokens: number, url = entry.url): Promise<number> {
    made += 1;
    const startedMs = clock.now();
    const response = await fetch(`${url}/v1/completions`, {
      method: "POST",
      headers: { "content-type": "application/json", "x-request-id": `links-${made}` },
      body: JSON.stringify({ prompt, max_tokens: maxTokens, temperature: 0, ignore_eos: true, stream: true }),
    });
    let ttftMs: number | undefined;
    let text = "";
    const decoder = new TextDecoder();
    for await (const chunk of response.body ?? []) {
      ttftMs ??= clock.now() - startedMs;
      text += decoder.decode(chunk, { stream: true });
    }
    if (response.ok && ttftMs !== undefined && text.includes("data: [DONE]")) return ttftMs;
    throw new Error(`a request ended with ${response.status}: ${text.slice(0, 500)} ${failures.join("; ")}`);
  }
  const settled = <T>(work: Promise<T>): Promise<T> => clock.settle(work, { limitMs: LIMIT_MS });

  // The proxy learns P's address, and D and P shake hands.
  await settled(send(freshPrompt(64), 2));
  await settled(send(freshPrompt(64), 2));
  return {
    async ttftMs({ inputTokens, outputTokens, atOnce, hitPercent }) {
      const prompts = Array.from({ length: atOnce }, () => freshPrompt(inputTokens + 1));
      const hit = Math.floor((inputTokens * hitPercent) / 100 / BLOCK_TOKENS) * BLOCK_TOKENS;
      const cacheAt = hitsAt === "prefill" ? prefill : entry.url;
      if (hit > 0) for (const prompt of prompts) await settled(send(prompt.slice(0, hit + 1), 1, cacheAt));
      const times = await settled(Promise.all(prompts.map((prompt) => send(prompt, outputTokens))));
      // Notifications that are still under way do not delay the next point.
      await clock.advance(1000);
      return median(times);
    },
    async close() {
      const closing = (async () => {
        for (const close of closers.reverse()) await close();
      })();
      // Timers of what closes fire in virtual time.
      let isClosed = false;
      void closing.finally(() => {
        isClosed = true;
      });
      while (!isClosed) await clock.advance(1000);
      await closing;
    },
  };
}
