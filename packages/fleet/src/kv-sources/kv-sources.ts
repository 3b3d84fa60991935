import type { Ambient, Random, YieldingQueue } from "@kv/interface";
import type { Instance } from "../instances/instance.js";
import { parseInstanceSpec } from "../instances/instance-spec.js";
import type { InstanceGet } from "../pairing/engine-facts.js";
import { type RoutedRequest, unsaltedIds } from "../request/generation-request.js";
import type { InstancePools } from "../routing/instance-pool.js";
import type { PrefillCosts } from "../routing/prefill-costs.js";
import type { RoutingContext } from "../routing/routing.js";
import type { FleetSettings } from "../settings/fleet-settings.js";
import { AskedPrompts } from "./asked-prompts.js";
import { PoolKeys, type PoolKeysStatus } from "./pool-keys.js";

/** Who else has a prompt's start: `host:port` of a P2P tier of vLLM 0.33. */
export interface KvHolder {
  readonly peer: string;
  /** Undefined for a pool. */
  readonly instance: Instance | undefined;
  /** Of the prompt's start. */
  readonly tokens: number;
}

/** Where an instance fetches a prompt's start, which it does not have and need not compute. */
export interface KvSource extends KvHolder {
  /** What the instance has itself. */
  readonly ownTokens: number;
}

export interface KvSourcesOptions extends Ambient {
  readonly settings: FleetSettings["kvSources"];
  readonly pools: InstancePools;
  readonly costs: PrefillCosts;
  readonly get: InstanceGet;
  readonly parses: YieldingQueue;
}

/**
 * `remote_kv_source` of vLLM's `kv_transfer_params`, as JSON text. `peer`: `host:port` of a P2P
 * tier, an IPv6 address in brackets.
 */
export function remoteKvSource(peer: string, random: Random): string {
  const { hostname, port } = new URL(`tcp://${peer}`);
  return JSON.stringify({
    kv_request_id: random.uuid(),
    remote_host: hostname.replace(/^\[|\]$/g, ""),
    remote_port: Number(port),
  });
}

/** Asking more instances would take longer than it saves. */
const MAX_INSTANCES = 64;

/** Chooses where prefill instances fetch prefixes from: pools, and the tiers of instances. */
export class KvSources {
  readonly #pools: readonly PoolKeys[];
  readonly asked = new AskedPrompts();

  /** @throws `KV_CONFIG_INVALID` for a pool's address that is not valid. */
  constructor(private readonly options: KvSourcesOptions) {
    this.#pools = options.settings.pools.map(
      (url) => new PoolKeys(parseInstanceSpec(url).url, options),
    );
  }

  /** Whether token ids would find a source. */
  readsTokenIds(): boolean {
    const { tierPort } = this.options.settings;
    return tierPort !== undefined || this.#pools.some(({ peer }) => peer !== undefined);
  }

  status(): readonly PoolKeysStatus[] {
    return this.#pools.map((pool) => pool.status());
  }

  /** Who has the start of a prompt, the longest first. None of a salted prompt, whose keys differ. */
  async holders(context: RoutingContext): Promise<readonly KvHolder[]> {
    const ids = unsaltedIds(context.request);
    if (ids === undefined) return [];
    const holders = this.#instances(context);
    for (const pool of this.#pools) {
      const { peer } = pool;
      if (peer === undefined) continue;
      const tokens = await this.options.parses.run(pool.matchedTokens(ids));
      holders.push({ peer, instance: undefined, tokens });
    }
    return holders
      .filter(({ tokens }) => tokens > 0)
      .sort((one, other) => other.tokens - one.tokens);
  }

  /** Remembers the prompt, which a new instance may fetch. */
  askedFor(request: RoutedRequest): void {
    const ids = unsaltedIds(request);
    if (ids !== undefined) this.asked.add(request.fields.model, ids);
  }

  /**
   * Has the pools copy what the instance has, before it ends. Resolves when they have it, or after
   * their time limit.
   */
  async handOver(instance: Instance): Promise<void> {
    const peer = this.#peerOf(instance);
    if (peer !== undefined) await Promise.all(this.#pools.map((pool) => pool.copyFrom(peer)));
  }

  /** Undefined where the instance itself has as much, or computes faster than it fetches. */
  sourceFor(
    instance: Instance,
    context: RoutingContext,
    holders: readonly KvHolder[],
  ): KvSource | undefined {
    const { pools, costs } = this.options;
    const { charactersPerToken } = costs;
    const ownTokens = pools[instance.role].cachedTokens(instance, context, charactersPerToken) ?? 0;
    const others = holders.filter((each) => each.instance !== instance);
    const holder = this.longest(others, ownTokens);
    return holder && { ...holder, ownTokens };
  }

  /** The longest, where an instance that has `ownTokens` gets the rest sooner than it computes it. */
  longest([holder]: readonly KvHolder[], ownTokens: number): KvHolder | undefined {
    const { costs } = this.options;
    const more = (holder?.tokens ?? 0) - ownTokens;
    const [fetchMs, computeMs] = [costs.fetchMs(more), costs.msPerToken];
    const isSlow = fetchMs !== undefined && computeMs !== undefined && fetchMs > computeMs * more;
    return more <= 0 || isSlow ? undefined : holder;
  }

  /**
   * The least loaded prefill instance, where it would have the prompt's KV sooner than the one that
   * the strategy chooses: waiting, fetching and computing. Undefined where the choice stays.
   */
  soonerThanChosen(
    context: RoutingContext,
    holders: readonly KvHolder[],
    excluding: ReadonlySet<Instance>,
  ): Instance | undefined {
    const { prefill } = this.options.pools;
    if (holders.length === 0 || context.prefillers !== undefined) return undefined;
    const chosen = context.preferredPrefill ?? prefill.choose(context, excluding);
    if (chosen === undefined) return undefined;
    const [other] = prefill.alternatives(1, new Set([chosen, ...excluding]), []);
    if (other === undefined || other.inFlight >= chosen.inFlight) return undefined;
    const [now, sooner] = [chosen, other].map((each) => this.#msUntilKv(each, context, holders));
    return now !== undefined && sooner !== undefined && sooner < now ? other : undefined;
  }

  /** Undefined before the first measurements. */
  #msUntilKv(
    instance: Instance,
    context: RoutingContext,
    holders: readonly KvHolder[],
  ): number | undefined {
    const { pools, costs } = this.options;
    const { charactersPerToken, msPerToken } = costs;
    const queueMs = costs.queueMs(instance.inFlight);
    const tokens = unsaltedIds(context.request)?.length;
    if (queueMs === undefined || msPerToken === undefined || tokens === undefined) return undefined;
    const source = this.sourceFor(instance, context, holders);
    if (source === undefined) {
      const own = pools.prefill.cachedTokens(instance, context, charactersPerToken) ?? 0;
      return queueMs + msPerToken * (tokens - own);
    }
    const fetchMs = costs.fetchMs(source.tokens - source.ownTokens) ?? 0;
    return queueMs + fetchMs + msPerToken * (tokens - source.tokens);
  }

  kvTransferParam({ peer }: KvHolder): string {
    return remoteKvSource(peer, this.options.random);
  }

  close(): void {
    for (const pool of this.#pools) pool.close();
  }

  /** Those that report what they have, by their KV events, and neither leave nor fail. */
  #instances(context: RoutingContext): KvHolder[] {
    const { pools, costs } = this.options;
    return Object.values(pools).flatMap((pool) =>
      pool
        .list()
        .slice(0, MAX_INSTANCES)
        .flatMap((instance) => {
          const peer = this.#peerOf(instance);
          if (peer === undefined || !instance.available() || !pool.reports(instance)) return [];
          const tokens = pool.cachedTokens(instance, context, costs.charactersPerToken) ?? 0;
          return [{ peer, instance, tokens }];
        }),
    );
  }

  /** Its P2P tier. */
  #peerOf({ url, dataParallelRank = 0 }: Instance): string | undefined {
    const { tierPort } = this.options.settings;
    return tierPort === undefined
      ? undefined
      : `${new URL(url).hostname}:${tierPort + dataParallelRank}`;
  }
}
