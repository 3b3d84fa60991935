import { type Instance, InstancePool, Pairing, prefixAware, type Role, type Routing } from "@kv/fleet";
import { PrometheusMetrics } from "@kv/fleet/front-end";
import { silentLog, systemClock, systemRandom } from "@kv/interface";
import { HealthChecks } from "../../../packages/fleet/src/health/health-checks.js";
import { BlockHolders } from "../../../packages/fleet/src/kv-events/block-holders.js";
import {
  BlockIndex,
  holdersOfPrompt,
  type SharedHolders,
} from "../../../packages/fleet/src/kv-events/block-index.js";
import { leastLoad, roundRobin } from "../../../packages/fleet/src/routing/routing.js";
import { sessionAffinity } from "../../../packages/fleet/src/routing/session-affinity.js";
import { startSideChannel } from "../../../packages/proxy/test/support/side-channel.js";
import { heldBytes, processorMs, processorTime } from "../costs.js";
import type { Group, Quantity } from "../quantity.js";

const INSTANCES = [2, 8, 32, 128, 512, 2048] as const;
const BLOCKS = [10_000, 100_000, 1_000_000, 10_000_000] as const;
const LOOKED_UP = [1000, 10_000, 100_000, 1_000_000] as const;
const BLOCK_TOKENS = 16;
/** Blocks of a prompt. */
const PROMPT_BLOCKS = 32;
const NONE: ReadonlySet<never> = new Set();
const TIMES = { coolDownMs: 1000, maxCoolDownMs: 30_000, slowReturnMs: 10_000 };
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
  { pairing, port }: { readonly pairing?: Pairing; readonly port?: number } = {},
): InstancePool {
  return new InstancePool({
    role,
    instances: Array.from({ length: count }, (_, at) => ({
      url: `http://127.0.0.1:${20_000 + at}`,
      ...(port === undefined ? {} : { kv: { host: "127.0.0.1", port } }),
    })),
    routing,
    clock,
    random: systemRandom(),
    times: TIMES,
    pairing,
  });
}

function routing(name: string, create: () => Routing): Quantity {
  return {
    name: `routing, ${name}`,
    unit: "us per choice",
    ...{ sizeOf: "instances", sizes: INSTANCES, exponent: 0 },
    measure(size) {
      const instances = pool("prefill", size, create());
      let at = 0;
      const request = { fields: { prompt: TEXT, user: "u" } };
      return processorTime("us", 1, () => {
        at += 1;
        instances.visit({ requestId: `${at}`, request }, NONE)?.succeeded();
      });
    },
  };
}

/** `everywhere`: each cache has the prompts that are asked for. Else one of them has each. */
function routingByEvents(name: string, everywhere: boolean): Quantity {
  return {
    name: `routing, prefix-aware, KV events, ${name}`,
    unit: "us per choice",
    ...{ sizeOf: "instances", sizes: INSTANCES, exponent: 0 },
    measure(size) {
      const indexes = new Map<Instance, BlockIndex>();
      const holders = new BlockHolders();
      const cached = {
        matchedTokens: (instance: Instance, tokens: ArrayLike<number>) =>
          indexes.get(instance)?.matchedTokens(tokens),
        holders: (tokens: ArrayLike<number>) => holdersOfPrompt(holders, tokens),
        follow() {},
        close() {},
      };
      const instances = pool("prefill", size, prefixAware({ cached }));
      for (const [at, instance] of instances.list().entries())
        indexes.set(instance, filled(1000, everywhere ? 0 : at, { holders, instance }));
      const prompts = Array.from({ length: 30 * size }, (_, at) =>
        promptOf(everywhere ? 0 : Math.floor(at / 30), at % 30),
      ).filter((_, at) => at % size === 0);
      let at = 0;
      return processorTime("us", 1, () => {
        at += 1;
        const request = { fields: { prompt: prompts[at % prompts.length] } };
        instances.visit({ requestId: `${at}`, request }, NONE)?.succeeded();
      });
    },
  };
}

/** An index of prompts of 32 blocks each. Another `seed`: other prompts. */
function filled(blocks: number, seed: number, shared: SharedHolders = ofOne()): BlockIndex {
  const index = new BlockIndex(Number.POSITIVE_INFINITY, shared);
  for (let prompt = 0; prompt * PROMPT_BLOCKS < blocks; prompt += 1) {
    index.stored({
      hashes: Array.from({ length: PROMPT_BLOCKS }, (_, at) => `${seed}:${prompt}:${at}`),
      parent: undefined,
      tokens: promptOf(seed, prompt).slice(0, -1),
      blockSize: BLOCK_TOKENS,
      group: { index: 0, needs: "all" },
    });
  }
  return index;
}

/** A table of holders as a router has it, with one instance. */
function ofOne(): SharedHolders {
  return {
    holders: new BlockHolders(),
    instance: { role: "prefill", url: "http://127.0.0.1:20000", inFlight: 0 },
  };
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

/** As many instances, half of each role, all of whose side channels were read. */
async function paired(count: number): Promise<Paired> {
  let engines = 0;
  const channel = await startSideChannel(() => ({ engineId: `e${++engines}`, vllmVersion: "0.33.0" }));
  const get = async () => ({ status: 404, body: "" });
  const pairing = new Pairing({
    mode: "lenient",
    timeoutMs: 60_000,
    refreshMs: 3_600_000,
    get,
    clock,
    log: silentLog,
  });
  const given = { pairing, port: channel.port };
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
      await channel.close();
    },
  };
}

async function withPaired(count: number, measure: (fleet: Paired) => Promise<number>): Promise<number> {
  const fleet = await paired(count);
  const cost = await measure(fleet);
  await fleet.close();
  return cost;
}

const quantities: Quantity[] = [
  ...Object.entries(STRATEGIES).map(([name, create]) => routing(name, create)),
  routingByEvents("one cache has the prompt", false),
  routingByEvents("all caches have it", true),
  {
    name: "pairing: start, with all side channels read",
    unit: "us per instance",
    ...{ sizeOf: "instances", sizes: INSTANCES, exponent: 0 },
    async measure(size) {
      const before = processorMs();
      const fleet = await paired(size);
      const cost = ((processorMs() - before) * 1000) / size;
      await fleet.close();
      return cost;
    },
  },
  {
    name: "pairing: choice of D for a P",
    unit: "us per choice",
    ...{ sizeOf: "instances", sizes: INSTANCES, exponent: 0 },
    measure: (size) =>
      withPaired(size, ({ pools: [prefill, decode] }) => {
        const [p] = prefill.list();
        return processorTime("us", 1, () => decode.visit({ requestId: "r" }, NONE, p)?.succeeded());
      }),
  },
  {
    name: "health: a round of checks, besides their HTTP",
    unit: "us per instance",
    ...{ sizeOf: "instances", sizes: INSTANCES, exponent: 0 },
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
    ...{ sizeOf: "instances", sizes: INSTANCES, exponent: 0 },
    measure: (size) =>
      withPaired(size, ({ pools }) => {
        const metrics = new PrometheusMetrics(pools);
        return processorTime("us", size, () => metrics.text());
      }),
  },
  {
    name: "prefix index: memory",
    unit: "bytes per block",
    ...{ sizeOf: "blocks", sizes: BLOCKS, exponent: 0, most: 64 },
    measure: (size) => heldBytes(size, () => filled(size, 0)),
  },
  {
    name: "prefix index: look-up of a prompt of 32 blocks",
    unit: "us per prompt",
    ...{ sizeOf: "blocks", sizes: LOOKED_UP, exponent: 0 },
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
    ...{ sizeOf: "blocks", sizes: LOOKED_UP, exponent: 0 },
    measure(size) {
      const index = filled(size, 0);
      let prompt = size;
      return processorTime("us", PROMPT_BLOCKS, () => {
        prompt += 1;
        const hashes = Array.from({ length: PROMPT_BLOCKS }, (_, at) => `0:${prompt}:${at}`);
        const tokens = promptOf(0, prompt).slice(0, -1);
        const group = { index: 0, needs: "all" } as const;
        index.stored({ hashes, parent: undefined, tokens, blockSize: BLOCK_TOKENS, group });
        index.removed({ hashes, group: 0 });
      });
    },
  },
];

export const fleet: Group = { name: "fleet", title: "@kv/fleet", quantities };
