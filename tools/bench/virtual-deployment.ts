import { connect, createServer, type Socket } from "node:net";
import { type Clock, type Log, type LogFields, silentLog } from "@kv/interface";
import { createProxy, type ProxySettingsInput } from "@kv/proxy";
import { listening } from "@kv/testing/http/listening";
import {
  memoryNetwork,
  memorySideChannel,
  memoryTransport,
  seededRandom,
  virtualClock,
} from "@kv/transport-memory";
import {
  type ClusterOptions,
  type PlannedInstance,
  planInstances,
  planProxy,
} from "../../apps/demo/src/cluster/cluster-plan.js";
import { startInstance } from "../../apps/demo/src/instance/instance.js";
import { readInstanceConfig } from "../../apps/demo/src/instance/instance-config.js";
import { tokens } from "./conversations.js";
import { ONE_PAIR } from "./deployments.js";

/**
 * 8 billion parameters in bfloat16 (32 layers, 8 KV heads of 128) on one GPU that computes 20,000
 * prompt tokens a second.
 */
export const MODEL = { forwardMsPer512Tokens: 25.6, layers: 32, kvBytesPerToken: 131_072 } as const;
/** A network adapter handles about five million work requests a second. */
const RANGE_MS = 0.0002;
/** Each virtual byte stands for many: a simulated layer of a token has 64 bytes. */
const SIMULATED = { layers: 4, kvHeads: 1, headDim: 8, maxModelLen: 8192 } as const;
const SIMULATED_BYTES_PER_TOKEN =
  SIMULATED.layers * SIMULATED.kvHeads * 2 * SIMULATED.headDim * Float32Array.BYTES_PER_ELEMENT;
/** A request that takes longer in virtual time has failed. */
const LIMIT_MS = 600_000;

export interface VirtualOptions {
  readonly linkGbits: number;
  /** Of a message between two processes; and until a transfer begins. */
  readonly hopMs: number;
  /** Default: that of a network adapter. */
  readonly rangeMs?: number;
  readonly decodeStepMs?: number;
  readonly fragmented?: boolean;
  /** Else P computes every prompt. */
  readonly prefillCaches?: boolean;
  readonly cluster?: Partial<ClusterOptions>;
  readonly proxy?: Partial<ProxySettingsInput>;
  readonly info?: Log["info"];
  /**
   * Of the event loop, that the clock waits before it advances: more than any chain of readers,
   * promises and immediates between two timers.
   */
  readonly turns?: number;
}

/** Delays every chunk on the given clock. */
async function delayedLink(targetUrl: string, clock: Clock, hopMs: number) {
  const { hostname, port } = new URL(targetUrl);
  const sockets = new Set<Socket>();
  const forward = (from: Socket, to: Socket) => {
    const later = (run: () => void) => void clock.setTimer(run, hopMs, { ref: true });
    sockets.add(from.setNoDelay(true));
    from.on("data", (chunk: Buffer) => later(() => void (to.destroyed || to.write(chunk))));
    from.on("end", () => later(() => void to.end()));
    from.on("error", () => to.destroy());
    from.on("close", () => sockets.delete(from));
  };
  const server = createServer({ allowHalfOpen: true }, (client) => {
    const upstream = connect({ host: hostname, port: Number(port), allowHalfOpen: true });
    forward(client, upstream);
    forward(upstream, client);
  });
  return {
    url: `http://127.0.0.1:${await listening(server)}`,
    close: () =>
      new Promise<void>((resolve) => {
        for (const socket of sockets) socket.destroy();
        server.close(() => resolve());
      }),
  };
}

/**
 * On a virtual clock. The proxy, the connectors and the engines' schedulers are the production
 * code.
 */
export async function openVirtual(given: VirtualOptions) {
  const { linkGbits, hopMs, rangeMs = RANGE_MS, turns = 24 } = given;
  /** Each turn of the event loop moves a message by one reader. */
  const turn = async () => {
    for (let left = turns; left > 0; left--) await new Promise((resolve) => setImmediate(resolve));
  };
  const clock = virtualClock({ turn });
  const network = memoryNetwork({
    clock,
    random: seededRandom("links"),
    latency: {
      latencyMs: hopMs,
      bytesPerMs: (linkGbits * 125_000 * SIMULATED_BYTES_PER_TOKEN) / MODEL.kvBytesPerToken,
      sharesBandwidth: true,
      rangeMs: (rangeMs * MODEL.layers) / SIMULATED.layers,
      pieceLengthBytes: 16 * 1024,
    },
  });
  const log = {
    ...silentLog,
    error: (event: string, fields?: LogFields) => console.error(event, fields),
    info: given.info ?? silentLog.info,
  };
  const simulate = { ...SIMULATED, forwardMsPer512Tokens: MODEL.forwardMsPer512Tokens };
  const options: ClusterOptions = {
    ...ONE_PAIR,
    transport: "memory",
    cacheTokens: 80_000,
    instance: {
      simulate: { ...simulate, leastPassMs: given.decodeStepMs },
      fragmented: given.fragmented,
      digests: false,
    },
    prefillInstance: { simulate, prefixCaching: given.prefillCaches === true },
    ...given.cluster,
  };

  const closers: (() => Promise<unknown>)[] = [];
  const link = async (url: string) => {
    const opened = await delayedLink(url, clock, hopMs);
    closers.push(opened.close);
    return opened.url;
  };
  const start = async ({ name, config }: PlannedInstance) => {
    const instance = await startInstance(readInstanceConfig(config), {
      log,
      clock,
      transport: memoryTransport({ network, host: name }),
      sideChannel: memorySideChannel({ network, host: name }),
    });
    closers.push(() => instance.close());
    return { url: await link(instance.url) };
  };
  const planned = planInstances(options);
  const prefills = await Promise.all(planned.prefills.map(start));
  const decodes = await Promise.all(planned.decodes.map(start));
  // Pairing reads side channels over TCP.
  const proxy = createProxy({
    ...planProxy(prefills, decodes, options),
    pairing: { mode: "off" },
    ...given.proxy,
    log,
    clock,
  });
  const { url } = await proxy.listen({ port: 0 });
  closers.push(() => proxy.close({ graceMs: 0 }));
  const urls = { proxy: await link(url), P: prefills[0]?.url ?? "" };

  let sent = 0;
  const sendVirtual = async (to: string, prompt: readonly number[], maxTokens: number) => {
    sent += 1;
    const requestId = `virtual-${sent}`;
    const startedMs = clock.now();
    const response = await fetch(`${to}/v1/completions`, {
      method: "POST",
      headers: { "content-type": "application/json", "x-request-id": requestId },
      body: JSON.stringify({
        prompt,
        max_tokens: maxTokens,
        temperature: 0,
        ignore_eos: true,
        stream: true,
        return_token_ids: true,
      }),
    });
    let ttftMs: number | undefined;
    let text = "";
    const decoder = new TextDecoder();
    for await (const chunk of response.body ?? []) {
      ttftMs ??= clock.now() - startedMs;
      text += decoder.decode(chunk, { stream: true });
    }
    if (!response.ok || ttftMs === undefined || !text.includes("data: [DONE]"))
      throw new Error(`a request ended with ${response.status}: ${text.slice(0, 500)}`);
    const pieces = Array.from(text.matchAll(/"token_ids":\[([0-9,]+)\]/g));
    const ids = pieces.flatMap(([, some = ""]) => some.split(",").map(Number));
    return { requestId, tokens: ids, ttftMs, totalMs: clock.now() - startedMs };
  };
  const send = {
    proxy: sendVirtual.bind(undefined, urls.proxy),
    P: sendVirtual.bind(undefined, urls.P),
  };
  const settled = <T>(work: Promise<T>): Promise<T> => clock.settle(work, { limitMs: LIMIT_MS });
  const close = async () => {
    let isClosed = false;
    const closing = (async () => {
      for (const closeOne of closers.reverse()) await closeOne();
    })().finally(() => {
      isClosed = true;
    });
    // Timers of what closes fire in virtual time.
    while (!isClosed) await clock.advance(1000);
    await closing;
  };

  // The proxy learns P's address, and D and P shake hands.
  for (const part of [1, 2]) await settled(send.proxy(tokens(65, 0, part), 2));
  return {
    clock,
    send,
    settled,
    prefillMetrics: () => settled(fetch(`${urls.P}/metrics`).then((response) => response.text())),
    close,
    [Symbol.asyncDispose]: close,
  };
}
