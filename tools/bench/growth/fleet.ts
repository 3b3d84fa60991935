import {
  type Instance,
  InstancePool,
  Pairing,
  type PooledInstance,
  prefixAware,
  type Role,
  type Routing,
} from "@kv/fleet";
import {
  type Fleet,
  PrefillCosts,
  PrometheusMetrics,
  parseGenerationRequest,
} from "@kv/fleet/front-end";
import { KvError, silentLog, systemClock, systemRandom } from "@kv/interface";
import { startSideChannel } from "@kv/testing/http/side-channel";
import { EndpointPicker } from "../../../packages/epp/src/pick/endpoint-picker.js";
import { HealthChecks } from "../../../packages/fleet/src/health/health-checks.js";
import { BlockIndex } from "../../../packages/fleet/src/kv-events/block-index.js";
import { BlockTree } from "../../../packages/fleet/src/kv-events/block-tree.js";
import { leastLoad, roundRobin } from "../../../packages/fleet/src/routing/routing.js";
import { sessionAffinity } from "../../../packages/fleet/src/routing/session-affinity.js";
import { type Group, heldBytes, processorMs, processorTime, type Quantity } from "./measure.js";

const INSTANCES = [2, 8, 32, 128, 512, 2048] as const;
const BY_INSTANCES = { sizeOf: "instances", sizes: INSTANCES };
const LOOKED_UP = { sizeOf: "blocks", sizes: [1000, 10_000, 100_000, 1_000_000] } as const;
const BLOCK_TOKENS = 16;
const UNLIMITED = Number.POSITIVE_INFINITY;
const PROMPT_BLOCKS = 32;
const NONE: ReadonlySet<never> = new Set();
/** Longer than a measurement takes. */
const TIMES = { coolDownMs: 600_000, maxCoolDownMs: 600_000, slowReturnMs: 600_000 };
const clock = systemClock();
const TEXT = "a system prompt that many requests begin with; ".repeat(90);
const GENERATION = parseGenerationRequest("/v1/completions", Buffer.from('{"prompt":"a"}'));

const STRATEGIES: Readonly<Record<string, () => Routing>> = {
  "round-robin": roundRobin,
  "least-load": leastLoad,
  "prefix-aware, text": prefixAware,
  "session-affinity": sessionAffinity,
};

function pool(
  role: Role,
  count: number,
  routing: Routing = roundRobin(),
  pairing?: Pairing,
  ports: readonly number[] = [],
): InstancePool {
  return new InstancePool({
    role,
    instances: Array.from({ length: count }, (_, at) => ({
      url: `http://127.0.0.1:${20_000 + at}`,
      ...(ports.length === 0 ? {} : { kv: { host: "127.0.0.1", port: ports[at % ports.length] } }),
    })),
    routing,
    clock,
    random: systemRandom(),
    times: TIMES,
    pairing,
  });
}

/** What a pool of each size costs per call of what `prepare` returns. */
const perCall = (
  name: string,
  unit: string,
  create: () => Routing,
  prepare: (instances: InstancePool) => (at: number) => void,
): Quantity => ({
  name: `routing, ${name}`,
  unit,
  ...BY_INSTANCES,
  measure(size) {
    const call = prepare(pool("prefill", size, create()));
    let at = 0;
    return processorTime("us", 1, () => {
      at += 1;
      call(at);
    });
  },
});

const unreachable = new KvError("KV_PROXY_UPSTREAM_FAILED", "x", { details: { stage: "connect" } });
const answered500 = new KvError("KV_PROXY_UPSTREAM_FAILED", "x", { details: { stage: "status" } });
const contextOf = (at: number, user = "u") => ({
  requestId: `${at}`,
  request: { fields: { prompt: TEXT, user } },
});

/** Of a healthy pool, after changes of its first instance, and twice. */
function strategy(name: string, create: () => Routing): Quantity[] {
  const after = (what: string, change: (first: PooledInstance) => void) =>
    perCall(`${name}, ${what}`, "us per choice", create, (instances) => {
      for (const first of instances.list().slice(0, 1)) change(first);
      return (at) => instances.visit(contextOf(at, `u${at}`), NONE)?.succeeded();
    });
  return [
    perCall(
      name,
      "us per choice",
      create,
      (instances) => (at) => instances.visit(contextOf(at), NONE)?.succeeded(),
    ),
    after("one instance cools down", (first) => first.begin().failed(unreachable)),
    after("one instance returns from ejection", (first) => {
      first.checked(unreachable, 1);
      first.checked(undefined, 1);
    }),
    perCall(
      `${name}, a request whose first instance answers with 500`,
      "us per request",
      create,
      (instances) => (at) => {
        const first = instances.visit(contextOf(at), NONE);
        if (first === undefined) return;
        first.failed(answered500);
        instances.visit(contextOf(at), new Set([first.instance]))?.succeeded();
      },
    ),
  ];
}

/** `everywhere`: each cache has the prompts. Else one of them has each. */
function routingByEvents(name: string, everywhere: boolean): Quantity {
  const indexes = new Map<Instance, BlockIndex>();
  let tree = new BlockTree();
  const cached = {
    matchedTokens: (instance: Instance, tokens: ArrayLike<number>) =>
      indexes.get(instance)?.matchedTokens(tokens),
    holders: (tokens: ArrayLike<number>) => tree.holders(tokens),
    follow() {},
    close() {},
  };
  const create = () => prefixAware({ cached });
  return perCall(`prefix-aware, KV events, ${name}`, "us per choice", create, (instances) => {
    indexes.clear();
    tree = new BlockTree();
    const all = instances.list();
    for (const [at, instance] of all.entries()) {
      const index = new BlockIndex(tree, instance, UNLIMITED);
      indexes.set(instance, filled(1000, everywhere ? 0 : at, index));
    }
    // Spread over the pool.
    const prompts = Array.from({ length: 30 }, (_, at) =>
      promptOf(everywhere ? 0 : Math.floor((at * all.length) / 30), (at * all.length) % 30),
    );
    return (at) => {
      const request = { fields: { prompt: prompts[at % prompts.length] } };
      instances.visit({ requestId: `${at}`, request }, NONE)?.succeeded();
    };
  });
}

function filled(blocks: number, seed: number, index = indexOfOne()): BlockIndex {
  for (let prompt = 0; prompt * PROMPT_BLOCKS < blocks; prompt += 1) store(index, seed, prompt);
  return index;
}

function store(index: BlockIndex, seed: number, prompt: number): string[] {
  const hashes = Array.from({ length: PROMPT_BLOCKS }, (_, at) => `${seed}:${prompt}:${at}`);
  const steps = index.stored({
    hashes,
    parent: undefined,
    tokens: promptOf(seed, prompt).slice(0, -1),
    blockSize: BLOCK_TOKENS,
    group: { index: 0, needs: "all" },
  });
  while (steps.next().done !== true);
  return hashes;
}

function indexOfOne(): BlockIndex {
  const instance: Instance = { role: "prefill", url: "http://127.0.0.1:20000", inFlight: 0 };
  return new BlockIndex(new BlockTree(), instance, UNLIMITED);
}

function promptOf(seed: number, prompt: number): number[] {
  const tokens = Array.from({ length: PROMPT_BLOCKS * BLOCK_TOKENS + 1 }, (_, at) => at & 1023);
  tokens[0] = seed;
  tokens[1] = prompt;
  return tokens;
}

type Pools = readonly [InstancePool, InstancePool];

/**
 * Half of each role. They take turns in the versions: those of one fit. `startMs`: the processor
 * time until all side channels were read.
 */
async function withPaired(
  count: number,
  versions: readonly string[],
  measure: (pools: Pools, startMs: number) => number | Promise<number>,
): Promise<number> {
  const channels = await Promise.all(
    versions.map((vllmVersion, at) =>
      startSideChannel(() => ({ engineId: `e${at}`, vllmVersion })),
    ),
  );
  const ports = channels.map(({ port }) => port);
  const beforeMs = processorMs();
  const pairing = new Pairing({
    mode: "lenient",
    timeoutMs: 60_000,
    refreshMs: 3_600_000,
    get: async () => ({ status: 404, body: "" }),
    clock,
    log: silentLog,
  });
  const half = (role: Role) => pool(role, count / 2, undefined, pairing, ports);
  const pools = [half("prefill"), half("decode")] as const;
  await pairing.settled();
  const cost = await measure(pools, processorMs() - beforeMs);
  pairing.close();
  for (const channel of channels) await channel.close();
  return cost;
}

const choosing = (
  name: string,
  unit: string,
  versions: readonly string[],
  prepare: (pools: Pools) => () => void,
): Quantity => ({
  ...BY_INSTANCES,
  name,
  unit,
  sizes: INSTANCES.slice(1),
  measure: (size) =>
    withPaired(size, versions, (pools) => {
      const choose = prepare(pools);
      // The lists that are kept until an instance changes are made.
      for (let at = 0; at < 100; at += 1) choose();
      return processorTime("us", 1, choose);
    }),
});

const pairs = (name: string, versions: readonly string[]) =>
  choosing(
    `pairing: choice of a P and of a D for it, ${name}`,
    "us per pair",
    versions,
    ([prefill, decode]) => {
      const context = { requestId: "r" };
      return () => {
        const p = prefill.visit(context, NONE, { avoiding: NONE });
        if (p === undefined) throw new Error("no P has a partner");
        decode.visit(context, NONE, p.instance)?.succeeded();
        p.succeeded();
      };
    },
  );

const picking = (
  name: string,
  versions: readonly string[],
  change: (first: PooledInstance) => void = () => {},
) =>
  choosing(
    `endpoint picker: a choice, ${name}`,
    "us per request",
    versions,
    ([prefill, decode]) => {
      const picker = new EndpointPicker({
        fleet: {
          pools: { prefill, decode },
          prefillCosts: new PrefillCosts(),
          ambient: { metrics: { count() {}, observe() {} } },
        } as unknown as Fleet,
        settings: {
          limits: { requestsPerDecode: 100 } as never,
          fallbacks: 2,
          unsplittable: "fail",
          disaggregateAbove: undefined,
        },
      });
      for (const first of prefill.list().slice(0, 1)) change(first);
      return () => {
        const choice = picker.pick({ requestId: "r", request: GENERATION });
        choice.decode.succeeded();
        choice.prefill?.succeeded();
      };
    },
  );

const ONE_VERSION = ["0.33.0"];
const TWO_VERSIONS = ["0.33.0", "0.32.0"];

export const group: Group = {
  title: "@kv/fleet",
  quantities: [
    ...Object.entries(STRATEGIES).flatMap(([name, create]) => strategy(name, create)),
    routingByEvents("one cache has the prompt", false),
    routingByEvents("all caches have it", true),
    {
      name: "pairing: start, with all side channels read",
      unit: "us per instance",
      ...BY_INSTANCES,
      measure: (size) => withPaired(size, ONE_VERSION, (_, startMs) => (startMs * 1000) / size),
    },
    pairs("all fit", ONE_VERSION),
    pairs("two versions, half fit", TWO_VERSIONS),
    picking("all fit", ONE_VERSION),
    picking("two versions", TWO_VERSIONS),
    picking("one P is ejected", ONE_VERSION, (first) => first.checked(unreachable, 1)),
    {
      name: "health: a round of checks, besides their HTTP",
      unit: "us per instance",
      ...BY_INSTANCES,
      async measure(size) {
        const pools = [pool("prefill", size / 2), pool("decode", size / 2)];
        const settings = { intervalMs: 3_600_000, timeoutMs: 1000, path: "/health", failures: 2 };
        return processorTime("us", size, async () => {
          let asked = 0;
          await new Promise<void>((resolve) => {
            const get = async () => {
              asked += 1;
              if (asked === size) setImmediate(resolve);
              return { status: 200, body: "" };
            };
            const checks = new HealthChecks(pools, get, settings, clock);
            setImmediate(() => checks.close());
          });
        });
      },
    },
    {
      name: "metrics: a scrape",
      unit: "us per instance",
      ...BY_INSTANCES,
      measure: (size) =>
        withPaired(size, ONE_VERSION, (pools) => {
          const metrics = new PrometheusMetrics(pools);
          return processorTime("us", size, () => metrics.text());
        }),
    },
    {
      name: "prefix index: memory",
      unit: "bytes per block",
      sizeOf: "blocks",
      sizes: [10_000, 100_000, 1_000_000, 10_000_000],
      most: 64,
      measure: (size) => heldBytes(size, () => filled(size, 0)),
    },
    {
      name: "prefix index: look-up of a prompt of 32 blocks",
      unit: "us per prompt",
      ...LOOKED_UP,
      measure(size) {
        const index = filled(size, 0);
        const prompts = Array.from({ length: 500 }, (_, at) =>
          promptOf(0, (at * 7919) % Math.ceil(size / PROMPT_BLOCKS)),
        );
        return processorTime("us", prompts.length, () => {
          for (const prompt of prompts) index.matchedTokens(prompt);
        });
      },
    },
    {
      name: "prefix index: an event that stores 32 blocks and one that removes them",
      unit: "us per block",
      ...LOOKED_UP,
      measure(size) {
        const index = filled(size, 0);
        let prompt = size;
        return processorTime("us", PROMPT_BLOCKS, () => {
          prompt += 1;
          const removing = index.removed({ hashes: store(index, 0, prompt), group: 0 });
          while (removing.next().done !== true);
        });
      },
    },
  ],
};
