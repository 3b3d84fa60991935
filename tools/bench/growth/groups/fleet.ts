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
import { EndpointPicker } from "../../../../packages/epp/src/pick/endpoint-picker.js";
import { HealthChecks } from "../../../../packages/fleet/src/health/health-checks.js";
import { BlockIndex } from "../../../../packages/fleet/src/kv-events/block-index.js";
import { BlockTree } from "../../../../packages/fleet/src/kv-events/block-tree.js";
import { leastLoad, roundRobin } from "../../../../packages/fleet/src/routing/routing.js";
import { sessionAffinity } from "../../../../packages/fleet/src/routing/session-affinity.js";
import { heldBytes, processorMs, processorTime } from "../costs.js";
import type { Group, Quantity } from "../quantity.js";

const INSTANCES = [2, 8, 32, 128, 512, 2048] as const;
const BY_INSTANCES = { sizeOf: "instances", sizes: INSTANCES, exponent: 0 };
const BLOCKS = [10_000, 100_000, 1_000_000, 10_000_000] as const;
const LOOKED_UP = [1000, 10_000, 100_000, 1_000_000] as const;
const BLOCK_TOKENS = 16;
const UNLIMITED = Number.POSITIVE_INFINITY;
/** Blocks of a prompt. */
const PROMPT_BLOCKS = 32;
const NONE: ReadonlySet<never> = new Set();
/** Longer than a measurement takes. */
const TIMES = { coolDownMs: 600_000, maxCoolDownMs: 600_000, slowReturnMs: 600_000 };
const clock = systemClock();
const TEXT = "a system prompt that many requests begin with; ".repeat(90);

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
  { pairing, ports = [] }: { readonly pairing?: Pairing; readonly ports?: readonly number[] } = {},
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

/** What a fleet of each size costs per call of what `prepare` returns. */
function perCall(
  name: string,
  unit: string,
  prepare: (size: number) => (at: number) => void,
): Quantity {
  return {
    name,
    unit,
    ...BY_INSTANCES,
    measure(size) {
      const call = prepare(size);
      let at = 0;
      return processorTime("us", 1, () => {
        at += 1;
        call(at);
      });
    },
  };
}

function routing(name: string, create: () => Routing): Quantity {
  return perCall(`routing, ${name}`, "us per choice", (size) => {
    const instances = pool("prefill", size, create());
    const request = { fields: { prompt: TEXT, user: "u" } };
    return (at) => instances.visit({ requestId: `${at}`, request }, NONE)?.succeeded();
  });
}

const unreachable = new KvError("KV_PROXY_UPSTREAM_FAILED", "x", { details: { stage: "connect" } });
const answered500 = new KvError("KV_PROXY_UPSTREAM_FAILED", "x", { details: { stage: "status" } });

/** Choices with each strategy after `change` of the first instance. */
function routingAfter(
  what: string,
  change: (first: PooledInstance) => void,
  name: string,
  create: () => Routing,
): Quantity {
  return perCall(`routing, ${name}, ${what}`, "us per choice", (size) => {
    const instances = pool("prefill", size, create());
    const [first] = instances.list();
    if (first !== undefined) change(first);
    return (at) => {
      const request = { fields: { prompt: TEXT, user: `u${at}` } };
      instances.visit({ requestId: `${at}`, request }, NONE)?.succeeded();
    };
  });
}

function bringBack(first: PooledInstance): void {
  first.checked(unreachable, 1);
  first.checked(undefined, 1);
}

/** A visit that was answered with 500, and one elsewhere. */
function secondAttempt(name: string, create: () => Routing): Quantity {
  const what = `routing, ${name}, a request whose first instance answers with 500`;
  return perCall(what, "us per request", (size) => {
    const instances = pool("prefill", size, create());
    return (at) => {
      const context = { requestId: `${at}`, request: { fields: { prompt: TEXT, user: "u" } } };
      const first = instances.visit(context, NONE);
      if (first === undefined) return;
      first.failed(answered500);
      instances.visit(context, new Set([first.instance]))?.succeeded();
    };
  });
}

/** `everywhere`: each cache has the prompts that are asked for. Else one of them has each. */
function routingByEvents(name: string, everywhere: boolean): Quantity {
  return perCall(`routing, prefix-aware, KV events, ${name}`, "us per choice", (size) => {
    const indexes = new Map<Instance, BlockIndex>();
    const tree = new BlockTree();
    const cached = {
      matchedTokens: (instance: Instance, tokens: ArrayLike<number>) =>
        indexes.get(instance)?.matchedTokens(tokens),
      holders: (tokens: ArrayLike<number>) => tree.holders(tokens),
      follow() {},
      close() {},
    };
    const instances = pool("prefill", size, prefixAware({ cached }));
    for (const [at, instance] of instances.list().entries())
      indexes.set(
        instance,
        filled(1000, everywhere ? 0 : at, new BlockIndex(tree, instance, UNLIMITED)),
      );
    const prompts = Array.from({ length: 30 * size }, (_, at) =>
      promptOf(everywhere ? 0 : Math.floor(at / 30), at % 30),
    ).filter((_, at) => at % size === 0);
    return (at) => {
      const request = { fields: { prompt: prompts[at % prompts.length] } };
      instances.visit({ requestId: `${at}`, request }, NONE)?.succeeded();
    };
  });
}

/** An index with prompts of 32 blocks each. Another `seed`: other prompts. */
function filled(blocks: number, seed: number, index = indexOfOne()): BlockIndex {
  for (let prompt = 0; prompt * PROMPT_BLOCKS < blocks; prompt += 1) {
    const steps = index.stored({
      hashes: Array.from({ length: PROMPT_BLOCKS }, (_, at) => `${seed}:${prompt}:${at}`),
      parent: undefined,
      tokens: promptOf(seed, prompt).slice(0, -1),
      blockSize: BLOCK_TOKENS,
      group: { index: 0, needs: "all" },
    });
    while (steps.next().done !== true);
  }
  return index;
}

/** The index of the only instance. */
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

interface Paired {
  readonly pairing: Pairing;
  readonly pools: readonly [InstancePool, InstancePool];
  close(): Promise<void>;
}

/**
 * As many instances, half of each role, all of whose side channels were read. They take turns in
 * the versions: those of one fit.
 */
async function paired(count: number, versions: readonly string[] = ["0.33.0"]): Promise<Paired> {
  let engines = 0;
  const channels = await Promise.all(
    versions.map((vllmVersion) =>
      startSideChannel(() => ({ engineId: `e${++engines}`, vllmVersion })),
    ),
  );
  const get = async () => ({ status: 404, body: "" });
  const pairing = new Pairing({
    mode: "lenient",
    timeoutMs: 60_000,
    refreshMs: 3_600_000,
    get,
    clock,
    log: silentLog,
  });
  const given = { pairing, ports: channels.map(({ port }) => port) };
  const pools = [
    pool("prefill", count / 2, undefined, given),
    pool("decode", count / 2, undefined, given),
  ] as const;
  await pairing.settled();
  return {
    pairing,
    pools,
    async close() {
      pairing.close();
      for (const channel of channels) await channel.close();
    },
  };
}

async function withPaired(
  count: number,
  measure: (fleet: Paired) => Promise<number>,
  versions?: readonly string[],
): Promise<number> {
  const fleet = await paired(count, versions);
  const cost = await measure(fleet);
  await fleet.close();
  return cost;
}

/**
 * What a choice costs in a fleet whose instances take turns in the versions. `prepare` makes the
 * function that chooses once.
 */
function choosing(
  name: string,
  unit: string,
  versions: readonly string[],
  prepare: (pools: Paired["pools"]) => () => void,
): Quantity {
  return {
    ...BY_INSTANCES,
    name,
    unit,
    sizes: INSTANCES.slice(1),
    measure: (size) =>
      withPaired(
        size,
        ({ pools }) => {
          const choose = prepare(pools);
          // The lists that are kept until an instance changes are made.
          for (let at = 0; at < 100; at += 1) choose();
          return processorTime("us", 1, choose);
        },
        versions,
      ),
  };
}

/** Choices of a P, and of a D for it. */
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

/** Picks for a gateway, after `change` of the first P. */
const picking = (
  name: string,
  versions: readonly string[],
  change: (first: PooledInstance) => void,
) =>
  choosing(
    `endpoint picker: a choice, ${name}`,
    "us per request",
    versions,
    ([prefill, decode]) => {
      const settings = {
        limits: { requestsPerDecode: 100 } as never,
        fallbacks: 2,
        unsplittable: "fail" as const,
        disaggregateAbove: undefined,
      };
      const picker = new EndpointPicker({
        fleet: {
          pools: { prefill, decode },
          prefillCosts: new PrefillCosts(),
          ambient: { metrics: { count() {}, observe() {} } },
        } as unknown as Fleet,
        settings,
      });
      const [first] = prefill.list();
      if (first !== undefined) change(first);
      const request = parseGenerationRequest("/v1/completions", Buffer.from('{"prompt":"a"}'));
      return () => {
        const choice = picker.pick({ requestId: "r", request });
        choice.decode.succeeded();
        choice.prefill?.succeeded();
      };
    },
  );

const TWO_VERSIONS = ["0.33.0", "0.32.0"];

const quantities: Quantity[] = [
  ...Object.entries(STRATEGIES).map(([name, create]) => routing(name, create)),
  ...Object.entries(STRATEGIES).flatMap(([name, create]) => [
    routingAfter(
      "one instance cools down",
      (first) => first.begin().failed(unreachable),
      name,
      create,
    ),
    routingAfter("one instance returns from ejection", bringBack, name, create),
    secondAttempt(name, create),
  ]),
  routingByEvents("one cache has the prompt", false),
  routingByEvents("all caches have it", true),
  {
    name: "pairing: start, with all side channels read",
    unit: "us per instance",
    ...BY_INSTANCES,
    async measure(size) {
      const before = processorMs();
      const fleet = await paired(size);
      const cost = ((processorMs() - before) * 1000) / size;
      await fleet.close();
      return cost;
    },
  },
  pairs("all fit", ["0.33.0"]),
  pairs("two versions, half fit", TWO_VERSIONS),
  picking("all fit", ["0.33.0"], () => {}),
  picking("two versions", TWO_VERSIONS, () => {}),
  picking("one P is ejected", ["0.33.0"], (first) => first.checked(unreachable, 1)),
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
          const probe = async () => {
            asked += 1;
            if (asked === size) setImmediate(resolve);
            return 200;
          };
          const checks = new HealthChecks(pools, probe, settings, { clock, log: silentLog });
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
      withPaired(size, ({ pools }) => {
        const metrics = new PrometheusMetrics(pools);
        return processorTime("us", size, () => metrics.text());
      }),
  },
  {
    name: "prefix index: memory",
    unit: "bytes per block",
    sizeOf: "blocks",
    sizes: BLOCKS,
    exponent: 0,
    most: 64,
    measure: (size) => heldBytes(size, () => filled(size, 0)),
  },
  {
    name: "prefix index: look-up of a prompt of 32 blocks",
    unit: "us per prompt",
    sizeOf: "blocks",
    sizes: LOOKED_UP,
    exponent: 0,
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
    sizeOf: "blocks",
    sizes: LOOKED_UP,
    exponent: 0,
    measure(size) {
      const index = filled(size, 0);
      let prompt = size;
      return processorTime("us", PROMPT_BLOCKS, () => {
        prompt += 1;
        const hashes = Array.from({ length: PROMPT_BLOCKS }, (_, at) => `0:${prompt}:${at}`);
        const tokens = promptOf(0, prompt).slice(0, -1);
        const group = { index: 0, needs: "all" } as const;
        const steps = index.stored({
          hashes,
          parent: undefined,
          tokens,
          blockSize: BLOCK_TOKENS,
          group,
        });
        while (steps.next().done !== true);
        const removing = index.removed({ hashes, group: 0 });
        while (removing.next().done !== true);
      });
    },
  },
];

export const fleet: Group = { name: "fleet", title: "@kv/fleet", quantities };
