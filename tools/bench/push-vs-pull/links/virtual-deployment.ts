import { type Clock, type LogFields, silentLog } from "@kv/interface";
import { createProxy, type ProxySettingsInput } from "@kv/proxy";
import {
  memoryNetwork,
  memorySideChannel,
  memoryTransport,
  seededRandom,
  virtualClock,
} from "@kv/transport-memory";
import {
  type ClusterOptions,
  planInstances,
  planProxy,
} from "../../../../apps/demo/src/cluster/cluster-plan.js";
import { startInstance } from "../../../../apps/demo/src/instance/instance.js";
import { readInstanceConfig } from "../../../../apps/demo/src/instance/instance-config.js";
import { median } from "../../report.js";
import {
  clusterOf,
  type ProcessorCosts,
  type ProcessTimes,
  type ThreadTimes,
  type Way,
} from "../ways.js";
import { cachedTokens, type Point, promptMaker } from "../workload.js";
import { delayedLink, type Message } from "./delayed-link.js";
import { Processors } from "./processors.js";

/** The hardware that a virtual deployment runs on, and its model. */
export interface World {
  /** Bytes that the link between P and D carries in a millisecond, in each direction. */
  readonly linkBytesPerMs: number;
  /**
   * Time of a message between two processes: of HTTP, a notification or a question on the side
   * channel; and until a transfer begins.
   */
  readonly hopMs: number;
  /** Time that each byte range of a transfer adds. */
  readonly rangeMs: number;
  readonly forwardMsPer512Tokens: number;
  readonly layers: number;
  readonly kvBytesPerToken: number;
  /** Cores that all processes share. Default: their work takes no time. */
  readonly cores?: number | undefined;
}

/** Each virtual byte stands for many: a simulated layer of a token has 64 bytes. */
const SIMULATED = { layers: 4, kvHeads: 1, headDim: 8, maxModelLen: 8192 } as const;
const SIMULATED_BYTES_PER_TOKEN =
  SIMULATED.layers * SIMULATED.kvHeads * 2 * SIMULATED.headDim * Float32Array.BYTES_PER_ELEMENT;
const CACHE_TOKENS = 80_000;
/** Timers of passes are shorter, and deadlines longer. */
const LONGEST_PART_MS = 1000;
/** A step of D where work takes time: the shortest that the simulated model waits for. */
const STEP_MS = 0.5;
/** A request that takes longer in virtual time has failed. */
const LIMIT_MS = 600_000;

/**
 * The proxy, P and D of the demo in this process, over the embedded transport, on a virtual clock.
 */
export interface VirtualDeployment {
  /**
   * Sends a point's requests at once. `costs`: what a request takes of the cores. Returns the
   * median time to the first token. Errors: those of the requests.
   */
  ttftMs(point: Point, costs?: ProcessorCosts): Promise<number>;
  /** Sends one request. It ends only while `settled` waits. Errors: those of the request. */
  send(prompt: readonly number[], maxTokens: number): Promise<Sent>;
  /** Advances the clock until the work is done. */
  settled<T>(work: Promise<T>): Promise<T>;
  readonly clock: Clock;
  /** P's, then D's. */
  readonly instances: readonly VirtualInstance[];
  /** The metrics of the first P, as Prometheus reads them. */
  prefillMetrics(): Promise<string>;
  close(): Promise<void>;
}

/** An instance, at the address that the proxy has. */
export interface VirtualInstance {
  readonly url: string;
  /** Ends as by SIGKILL. Resolves when a spare one has taken the place, after so long. */
  replace(goneMs: number): Promise<void>;
}

/** A request that has ended. */
export interface Sent {
  readonly requestId: string;
  readonly tokens: readonly number[];
  readonly ttftMs: number;
  readonly totalMs: number;
}

export interface VirtualDeploymentOptions {
  /** Settings of the instances that differ. */
  readonly cluster?: Partial<ClusterOptions> | undefined;
  /** Settings of the proxy that differ. */
  readonly proxy?: Partial<ProxySettingsInput> | undefined;
  /** Shortest pass of D. Default: none, or that of the simulated model where work takes time. */
  readonly decodeStepMs?: number | undefined;
  /** Called with the proxy's record of each request. */
  readonly requestDone?: ((fields: LogFields) => void) | undefined;
  /**
   * The instance that has the part `hitPercent` of each prompt in its prefix cache. Default:
   * decode.
   */
  readonly hitsAt?: "prefill" | "decode" | undefined;
  /** Instances of each role that take the place of others. Default: none. */
  readonly spares?: number | undefined;
  /**
   * Turns of the event loop that the clock waits before it advances: more than any chain of
   * readers, promises and immediates between two timers. Default: 24.
   */
  readonly turns?: number | undefined;
}

/**
 * Resolves when everything that was ready in this process has run, also what passes through its own
 * TCP connections: the kernel delivers loopback data as it is written, so each turn of the event
 * loop moves a message by one reader.
 */
async function settledIo(turns: number): Promise<void> {
  for (let left = turns; left > 0; left--) await new Promise((resolve) => setImmediate(resolve));
}

export async function openVirtualDeployment(
  way: Way,
  pool: Point["pool"],
  world: World,
  given: VirtualDeploymentOptions = {},
): Promise<VirtualDeployment> {
  const { hitsAt = "decode", turns = 24, requestDone, spares = 0 } = given;
  const clock = virtualClock({ turn: () => settledIo(turns) });
  const scale = world.kvBytesPerToken / SIMULATED_BYTES_PER_TOKEN;
  const network = memoryNetwork({
    clock,
    random: seededRandom("links"),
    latency: {
      latencyMs: world.hopMs,
      bytesPerMs: world.linkBytesPerMs / scale,
      sharesBandwidth: true,
      rangeMs: (world.rangeMs * world.layers) / SIMULATED.layers,
      pieceLengthBytes: 16 * 1024,
    },
  });
  const failures: string[] = [];
  const log = {
    ...silentLog,
    error: (event: string, fields?: LogFields) =>
      void failures.push(`${event} ${JSON.stringify(fields)}`),
    info: (event: string, fields: LogFields = {}) => {
      if (event === "request-done") requestDone?.(fields);
    },
  };
  const options = {
    ...clusterOf(way, pool, { ...SIMULATED, forwardMsPer512Tokens: world.forwardMsPer512Tokens }),
    transport: "memory",
    cacheTokens: CACHE_TOKENS,
    // Without hits at P, it computes every prompt.
    prefillInstance: { prefixCaching: hitsAt === "prefill" },
    ...given.cluster,
  } as const;
  const planned = planInstances({
    ...options,
    prefills: options.prefills + spares,
    decodes: options.decodes + spares,
  });
  const stepMs = given.decodeStepMs ?? (world.cores === undefined ? undefined : STEP_MS);
  const processors = new Processors(clock, world.cores ?? 1);
  let costs: ProcessorCosts | undefined;
  /** P's forward pass of a prompt. */
  let promptMs = 0;
  /**
   * What a request costs a process comes where the process works for it: the client's before the
   * request leaves, half of the proxy's before each leg, half of D's when the leg arrives and half
   * when it answers, a quarter of P's at each of these and half in the forward pass. A token's is
   * taken at each hop of the answer.
   */
  const handleAt =
    (link: "client" | "prefill" | "decode") =>
    async ({ begins, tokens }: Message): Promise<void> => {
      if (costs === undefined) return;
      const { requestMs, tokenMs } = costs;
      const work = (process: keyof ProcessTimes, of: ThreadTimes, share: number) =>
        processors.work(process, of.main[process] * share, of.beside[process] * share);
      const further = begins === "answer" ? tokens - 1 : tokens;
      if (link === "client") {
        await (begins === "request"
          ? work("client", requestMs, 1)
          : work("client", tokenMs, further));
        return;
      }
      if (begins === "request") await work("proxy", requestMs, 1 / 2);
      if (begins !== undefined) await work(link, requestMs, link === "decode" ? 1 / 2 : 1 / 4);
      await work("proxy", tokenMs, further);
    };
  /**
   * A forward pass takes as long as it does alone, or longer where the process waits for a core.
   * `share`: the part of the costs that a part of it takes.
   */
  const passClock = (
    process: "prefill" | "decode",
    of: (costs: ProcessorCosts) => ThreadTimes,
    share: (partMs: number) => number,
  ): Clock => ({
    now: () => clock.now(),
    setTimer(run, ms, options) {
      const isPass = options?.ref === true && ms < LONGEST_PART_MS;
      if (costs === undefined || !isPass) return clock.setTimer(run, ms, options);
      const { main, beside } = of(costs);
      processors.beside(beside[process] * share(ms));
      const doneMs = processors.doneInMs(process, main[process] * share(ms));
      return clock.setTimer(run, Math.max(ms, doneMs), options);
    },
  });
  const clocks = {
    prefill: passClock(
      "prefill",
      ({ requestMs }) => requestMs,
      (partMs) => partMs / 2 / promptMs,
    ),
    decode: passClock(
      "decode",
      ({ tokenMs }) => tokenMs,
      () => 1,
    ),
  };
  const closers: (() => Promise<unknown>)[] = [];
  const linkAt = (link: "client" | "prefill" | "decode") => ({
    clock,
    hopMs: world.hopMs,
    handle: world.cores === undefined ? undefined : handleAt(link),
  });
  const start = async (
    role: "prefill" | "decode",
    { name, config }: (typeof planned.prefills)[number],
  ) => {
    const simulate =
      role === "decode" && config.simulate
        ? { ...config.simulate, leastPassMs: stepMs }
        : config.simulate;
    const instance = await startInstance(readInstanceConfig({ ...config, simulate }), {
      log,
      clock: clocks[role],
      transport: memoryTransport({ network, host: name }),
      sideChannel: memorySideChannel({ network, host: name }),
    });
    closers.push(() => instance.close());
    return { url: instance.url, host: network.host(name) };
  };
  const startAll = async (
    role: "prefill" | "decode",
    count: number,
  ): Promise<VirtualInstance[]> => {
    const all = await Promise.all(planned[`${role}s`].map((one) => start(role, one)));
    const waiting = all.slice(count);
    const open = async (first: (typeof all)[number]) => {
      const link = await delayedLink(first.url, linkAt(role));
      closers.push(() => link.close());
      let present = first;
      const replace = async (goneMs: number) => {
        const next = waiting.shift();
        if (next === undefined) throw new Error(`no spare ${role} instance is left`);
        present.host.kill();
        link.cut(undefined);
        await new Promise<void>((resolve) => void clock.setTimer(resolve, goneMs, { ref: true }));
        present = next;
        link.cut(next.url);
      };
      return { url: link.url, replace };
    };
    return Promise.all(all.slice(0, count).map(open));
  };
  const prefills = await startAll("prefill", options.prefills);
  const [{ url: prefill } = { url: "" }] = prefills;
  const decodes = await startAll("decode", options.decodes);
  // Pairing reads side channels over TCP.
  const proxy = createProxy({
    ...planProxy(
      prefills.map(({ url }) => ({ url })),
      decodes.map(({ url }) => ({ url })),
      options,
    ),
    pairing: { mode: "off" },
    ...given.proxy,
    log,
    clock,
  });
  const { url: proxyUrl } = await proxy.listen({ port: 0 });
  closers.push(() => proxy.close({ graceMs: 0 }));
  const entry = await delayedLink(proxyUrl, linkAt("client"));
  closers.push(() => entry.close());

  let made = 0;
  const makePrompt = promptMaker();
  async function send(
    prompt: readonly number[],
    maxTokens: number,
    url = entry.url,
  ): Promise<Sent> {
    made += 1;
    const requestId = `links-${made}`;
    const startedMs = clock.now();
    const response = await fetch(`${url}/v1/completions`, {
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
    if (response.ok && ttftMs !== undefined && text.includes("data: [DONE]")) {
      const pieces = [...text.matchAll(/"token_ids":\[([0-9,]+)\]/g)];
      const tokens = pieces.flatMap(([, ids = ""]) => ids.split(",").map(Number));
      return { requestId, tokens, ttftMs, totalMs: clock.now() - startedMs };
    }
    throw new Error(
      `a request ended with ${response.status}: ${text.slice(0, 500)} ${failures.join("; ")}`,
    );
  }
  const settled = <T>(work: Promise<T>): Promise<T> => clock.settle(work, { limitMs: LIMIT_MS });

  // The proxy learns P's address, and D and P shake hands.
  await settled(send(makePrompt({ inputTokens: 64 }), 2));
  await settled(send(makePrompt({ inputTokens: 64 }), 2));
  return {
    clock,
    settled,
    instances: [...prefills, ...decodes],
    send: (prompt, maxTokens) => send(prompt, maxTokens),
    prefillMetrics: () => settled(fetch(`${prefill}/metrics`).then((response) => response.text())),
    async ttftMs(point, ofPoint) {
      const prompts = Array.from({ length: point.atOnce }, () => makePrompt(point));
      const hit = cachedTokens(point);
      const cacheAt = hitsAt === "prefill" ? prefill : entry.url;
      if (hit > 0)
        for (const prompt of prompts) await settled(send(prompt.slice(0, hit + 1), 1, cacheAt));
      costs = ofPoint;
      promptMs = (world.forwardMsPer512Tokens * (point.inputTokens + 1)) / 512;
      const times = await settled(
        Promise.all(prompts.map((prompt) => send(prompt, point.outputTokens))),
      );
      // Notifications that are still under way do not delay the next point.
      await clock.advance(1000);
      costs = undefined;
      return median(times.map((sent) => sent.ttftMs));
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
