import { type Ambient, ambient, type Clock, type Random, type Timer } from "@kv/interface";
import type { DiscoveredInstances, Discovery } from "../discovery/discovery.js";
import { repeat } from "../repeat.js";
import type { KubernetesSettings } from "../settings/fleet-settings.js";
import { ApiConnection, ApiError } from "./api-connection.js";
import { readPod } from "./read-pod.js";

/** Options of `kubernetesDiscovery`, as in the setting `discovery.kubernetes`. */
export interface KubernetesDiscoveryOptions extends KubernetesSettings {
  /** @default systemClock() */
  readonly clock?: Clock | undefined;
  /** Spreads reconnections. @default systemRandom() */
  readonly random?: Random | undefined;
}

/** Changes within this time are reported once. */
const COALESCE_MS = 20;
const PAGE_PODS = "500";
/** 500 times as many as a large deployment has. */
const MAX_PODS = 100_000;
/** Twice what that many pods need. */
const MAX_PAGES = 400;
const MAX_LIST_MS = 120_000;
const WATCH_SECONDS = 300;
/** Bookmarks come about every minute, so a silent watch is a dead connection. */
const WATCH_IDLE_MS = 150_000;
const SHORT_WATCH_MS = 1_000;
const FIRST_RETRY_MS = 500;
const MAX_RETRY_MS = 30_000;

/**
 * Follows pods in Kubernetes. Instances that are not ready or begin to end are left out at once. The last known ones stay while the API server cannot be read.
 * `watch` sends the first request.
 *
 * @throws `KV_CONFIG_INVALID` without the package `@kubernetes/client-node`, or if the cluster's
 * configuration cannot be read.
 */
export async function kubernetesDiscovery(options: KubernetesDiscoveryOptions): Promise<Discovery> {
  const { podSelector, port = "http", roleLabel = "llm-d.ai/role" } = options;
  const ports = typeof port === "object" ? port : { prefill: port, decode: port };
  const reading = { ...options, port: ports, roleLabel };
  const connection = new ApiConnection(options);
  const namespace = encodeURIComponent(options.namespace ?? (await connection.namespace()));
  const pods = { path: `/api/v1/namespaces/${namespace}/pods`, labelSelector: podSelector };
  return {
    name: `Kubernetes pods ${podSelector}`,
    watch: (onChange, onError) =>
      new Reflector({
        ...pods,
        ...ambient(options),
        connection,
        read: (pod) => readPod(pod, reading),
        onChange,
        onError,
      }),
  };
}

interface ReflectorOptions extends Ambient {
  readonly connection: ApiConnection;
  readonly path: string;
  readonly labelSelector: string;
  readonly read: (pod: unknown) => DiscoveredInstances | undefined;
  readonly onChange: (found: DiscoveredInstances) => void;
  readonly onError: (error: unknown) => void;
}

interface Pod {
  readonly metadata?: {
    readonly uid?: string;
    readonly name?: string;
    readonly resourceVersion?: string;
  };
}

type Pods = Map<string, DiscoveredInstances>;

/** Follows pods by a list and a watch. */
class Reflector {
  readonly #closing = new AbortController();
  readonly #following: { close(): void };
  #pods: Pods = new Map();
  #resourceVersion: string | undefined;
  #failures = 0;
  #timer: Timer | undefined;

  constructor(private readonly options: ReflectorOptions) {
    this.#following = repeat(options.clock, () => this.#follow());
  }

  close(): void {
    this.#closing.abort();
    this.#following.close();
    this.#timer?.cancel();
  }

  /** Resolves at the end of a watch, with the time until the next one. */
  async #follow(): Promise<number> {
    try {
      if (this.#resourceVersion === undefined) await this.#list();
      await this.#watch();
    } catch (error) {
      if (this.#closing.signal.aborted) return 0;
      // 410: the version is too old.
      const status = error instanceof ApiError ? error.status : 0;
      if (status === 410) this.#resourceVersion = undefined;
      this.#failures += 1;
      // Normal operation: a version expires, a token is replaced.
      if (this.#failures === 1 && (status === 401 || status === 410)) return 0;
      this.options.onError(error);
    }
    return this.#waitMs();
  }

  async #list(): Promise<void> {
    const { connection, path, labelSelector, clock } = this.options;
    const pods: Pods = new Map();
    const query: Record<string, string> = { limit: PAGE_PODS, labelSelector };
    const beganAtMs = clock.now();
    for (let pages = 0; ; pages += 1) {
      const passedMs = clock.now() - beganAtMs;
      if (pages >= MAX_PAGES || passedMs > MAX_LIST_MS)
        throw new Error(
          `a list of the API server has no end: ${pages} pages in ${Math.round(passedMs / 1000)} s; the limits are ${MAX_PAGES}, and ${MAX_LIST_MS / 1000} s`,
        );
      const { metadata, items = [] } = (await connection.get(
        path,
        query,
        this.#closing.signal,
      )) as {
        readonly metadata?: { readonly resourceVersion?: string; readonly continue?: string };
        readonly items?: readonly Pod[];
      };
      for (const pod of items) this.#keep(pods, pod);
      if (metadata?.continue) {
        query.continue = metadata.continue;
        continue;
      }
      this.#pods = pods;
      this.#resourceVersion = metadata?.resourceVersion ?? "0";
      this.#changed();
      return;
    }
  }

  async #watch(): Promise<void> {
    const { connection, path, labelSelector, clock } = this.options;
    const query = {
      labelSelector,
      resourceVersion: this.#resourceVersion ?? "0",
      allowWatchBookmarks: "true",
      timeoutSeconds: String(WATCH_SECONDS),
    };
    const onOpen = () => {
      if (this.#failures > 0) this.#changed();
    };
    const options = { idleMs: WATCH_IDLE_MS, signal: this.#closing.signal, onOpen };
    let hasEvents = false;
    const startedAtMs = clock.now();
    await connection.watch(path, query, options, (event) => {
      this.#apply(event as { readonly type: string; readonly object: Pod });
      this.#failures = 0;
      hasEvents = true;
    });
    // A server may end each watch at once.
    const isShort = !hasEvents && clock.now() - startedAtMs < SHORT_WATCH_MS;
    this.#failures = isShort ? this.#failures + 1 : 0;
  }

  #apply({ type, object }: { readonly type: string; readonly object: Pod }): void {
    if (type === "ERROR") {
      const { code = 500, message = "" } = object as { code?: number; message?: string };
      throw new ApiError(code, `the watch ended with ${code}: ${message}`);
    }
    this.#resourceVersion = object.metadata?.resourceVersion ?? this.#resourceVersion;
    if (type === "BOOKMARK") return;
    const isGone = type === "DELETED" || !this.#keep(this.#pods, object);
    if (!isGone || this.#pods.delete(keyOf(object))) this.#changed();
  }

  /** False for a pod that is no instance. */
  #keep(pods: Pods, pod: Pod): boolean {
    const instances = this.options.read(pod);
    if (instances === undefined) return false;
    const key = keyOf(pod);
    if (pods.size >= MAX_PODS && !pods.has(key))
      throw new Error(`the API server has more than ${MAX_PODS} objects of a kind`);
    pods.set(key, instances);
    return true;
  }

  #changed(): void {
    const { clock, onChange } = this.options;
    if (this.#closing.signal.aborted) return;
    this.#timer ??= clock.setTimer(() => {
      this.#timer = undefined;
      const pods = [...this.#pods.values()];
      onChange({
        prefillers: pods.flatMap(({ prefillers }) => prefillers),
        decoders: pods.flatMap(({ decoders }) => decoders),
      });
    }, COALESCE_MS);
  }

  /** Spreads many clients when a server is back. */
  #waitMs(): number {
    if (this.#failures === 0) return 0;
    const delayMs = Math.min(FIRST_RETRY_MS * 2 ** Math.min(this.#failures - 1, 10), MAX_RETRY_MS);
    return delayMs * (0.5 + this.options.random.next() / 2);
  }
}

function keyOf({ metadata }: Pod): string {
  return metadata?.uid ?? metadata?.name ?? "";
}
