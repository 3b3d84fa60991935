import { type Clock, KvError, type Log } from "@kv/interface";
import type { Instance } from "../instances/instance.js";
import { instanceGet, type Upstream } from "../upstream/upstream.js";

/** The KV cache of an instance. */
export interface CacheCapacity {
  readonly blocks: number;
  readonly blockTokens: number;
}

const TIMEOUT_MS = 3000;
const MAX_METRICS_BYTES = 4 * 1024 * 1024;
const ASK_AGAIN_MS = 30_000;

interface CapacityOptions {
  readonly upstream: Upstream;
  readonly clock: Clock;
  readonly log: Log;
}

interface Reading {
  engineId: string | undefined;
  readonly atMs: number;
  readonly capacity: Promise<CacheCapacity | undefined>;
}

/** Sizes of instances' caches, from `vllm:cache_config_info`, read once per engine. */
export class CacheCapacities {
  readonly #readings = new WeakMap<Instance, Reading>();

  constructor(private readonly options: CapacityOptions) {}

  /** Reads early, so that `of` answers at once. */
  expect(instance: Instance): void {
    if (!this.#readings.has(instance)) void this.#begin(instance, undefined);
  }

  /** Undefined if the metrics do not say it. Never rejects. */
  async of(instance: Instance, engineId: string): Promise<CacheCapacity | undefined> {
    const { clock } = this.options;
    const known = this.#readings.get(instance);
    if (known !== undefined) known.engineId ??= engineId;
    if (known?.engineId === engineId) {
      const capacity = await known.capacity;
      if (capacity !== undefined || clock.now() - known.atMs < ASK_AGAIN_MS) return capacity;
    }
    return this.#begin(instance, engineId);
  }

  #begin(instance: Instance, engineId: string | undefined): Promise<CacheCapacity | undefined> {
    const capacity = this.#read(instance);
    this.#readings.set(instance, { engineId, atMs: this.options.clock.now(), capacity });
    return capacity;
  }

  async #read({ role, url, dataParallelRank }: Instance): Promise<CacheCapacity | undefined> {
    const { upstream, clock, log } = this.options;
    const get = instanceGet(upstream, clock, MAX_METRICS_BYTES);
    let reason = "it has no vllm:cache_config_info with num_gpu_blocks and block_size";
    try {
      const { status, body } = await get({ role, url, path: "/metrics", timeoutMs: TIMEOUT_MS });
      const capacity = status === 200 ? capacityIn(body, dataParallelRank) : undefined;
      if (capacity !== undefined) return capacity;
      if (status !== 200) reason = `the status is ${status}`;
    } catch (error) {
      reason = KvError.from(error, "KV_INTERNAL", "failed").message;
    }
    const hint = "without the size of its cache no KV is kept there for further turns";
    log.warn("cache-size-unknown", { instance: url, reason: `GET /metrics: ${reason}`, hint });
    return undefined;
  }
}

function capacityIn(metrics: string, rank: number | undefined): CacheCapacity | undefined {
  const lines = [...metrics.matchAll(/^vllm:cache_config_info\{(.*)\}/gm)].map(
    ([, labels = ""]) => labels,
  );
  const line = lines.find((labels) => labelOf(labels, "engine") === rank) ?? lines[0] ?? "";
  const blocks = labelOf(line, "num_gpu_blocks");
  const blockTokens = labelOf(line, "block_size");
  return blocks === undefined || blockTokens === undefined ? undefined : { blocks, blockTokens };
}

function labelOf(labels: string, name: string): number | undefined {
  const text = new RegExp(`(?:^|,)${name}="([0-9]{1,12})"`).exec(labels)?.[1];
  return text === undefined ? undefined : Number(text);
}
