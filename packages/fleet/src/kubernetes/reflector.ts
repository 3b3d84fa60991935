import type { Clock, Random } from "@kv/interface";
import { type ApiConnection, ApiError } from "./api-connection.js";

/** What `Reflector` gets. */
export interface ReflectorOptions<T> {
  readonly connection: ApiConnection;
  readonly path: string;
  readonly labelSelector: string;
  readonly read: (object: unknown) => T | undefined;
  /** Called after a list, after each event, and when a watch is open again after a failure. */
  readonly onChange: () => void;
  /** Called when the API server cannot be read. What is known stays. */
  readonly onError: (error: unknown) => void;
  readonly clock: Clock;
  readonly random: Random;
}

const PAGE_OBJECTS = "500";
/** Objects that are kept of one collection: 500 times as many as a large deployment has. */
const MAX_OBJECTS = 100_000;
/** Of a list, which has as many pages at most as that many objects need, twice. */
const MAX_PAGES = 400;
/** For all pages of a list, in ms. */
const MAX_LIST_MS = 120_000;
/** The server ends a watch after this time. */
const WATCH_SECONDS = 300;
/**
 * Bookmarks come about once a minute, so a watch without any byte for this long is a dead
 * connection.
 */
const WATCH_IDLE_MS = 150_000;
const SHORT_WATCH_MS = 1_000;
const FIRST_RETRY_MS = 500;
const MAX_RETRY_MS = 30_000;

interface KubernetesObject {
  readonly metadata?: {
    readonly uid?: string;
    readonly name?: string;
    readonly resourceVersion?: string;
  };
}

/**
 * Keeps what is read of the objects of one collection in step with the API server, by a list and a
 * watch.
 */
export class Reflector<T> {
  readonly #options: ReflectorOptions<T>;
  readonly #closing = new AbortController();
  #items = new Map<string, T>();
  #listed = false;
  /** From where on the next watch begins; undefined: a list is needed. */
  #resourceVersion: string | undefined = undefined;
  #failures = 0;

  constructor(options: ReflectorOptions<T>) {
    this.#options = options;
    void this.#run();
  }

  items(): Iterable<T> | undefined {
    return this.#listed && !this.#closing.signal.aborted ? this.#items.values() : undefined;
  }

  close(): void {
    this.#closing.abort();
  }

  async #run(): Promise<void> {
    const { signal } = this.#closing;
    while (!signal.aborted) {
      try {
        if (this.#resourceVersion === undefined) await this.#list();
        await this.#watch();
      } catch (error) {
        if (signal.aborted) return;
        // 410: the version is too old for a watch, or for the next page of a list.
        if (error instanceof ApiError && error.status === 410) this.#resourceVersion = undefined;
        this.#failures += 1;
        // Both are usual once: a version becomes too old, and a token is replaced.
        if (this.#failures === 1 && error instanceof ApiError && [401, 410].includes(error.status))
          continue;
        this.#options.onError(error);
        await this.#wait();
      }
    }
  }

  async #list(): Promise<void> {
    const { connection, path, labelSelector, read, onChange, clock } = this.#options;
    const items = new Map<string, T>();
    const query: Record<string, string> = { limit: PAGE_OBJECTS, labelSelector };
    let version: string | undefined;
    const beganAtMs = clock.now();
    for (let pages = 1; ; pages += 1) {
      if (pages > MAX_PAGES || clock.now() - beganAtMs > MAX_LIST_MS)
        throw new Error(
          `a list of the API server has no end: ${pages - 1} pages in ${Math.round((clock.now() - beganAtMs) / 1000)} s; the limits are ${MAX_PAGES}, and ${MAX_LIST_MS / 1000} s`,
        );
      const page = (await connection.get(path, query, this.#closing.signal)) as {
        readonly metadata?: { readonly resourceVersion?: string; readonly continue?: string };
        readonly items?: readonly KubernetesObject[];
      };
      for (const object of page.items ?? []) {
        const item = read(object);
        if (item !== undefined) keep(items, object, item);
      }
      version = page.metadata?.resourceVersion;
      const next = page.metadata?.continue;
      if (next === undefined || next === "") break;
      query.continue = next;
    }
    this.#items = items;
    this.#listed = true;
    this.#resourceVersion = version ?? "0";
    onChange();
  }

  async #watch(): Promise<void> {
    const { connection, path, labelSelector, onChange, clock } = this.#options;
    const query = {
      labelSelector,
      resourceVersion: this.#resourceVersion ?? "0",
      allowWatchBookmarks: "true",
      timeoutSeconds: String(WATCH_SECONDS),
    };
    const onOpen = () => {
      if (this.#failures > 0) onChange();
    };
    const options = { idleMs: WATCH_IDLE_MS, signal: this.#closing.signal, onOpen };
    let hasEvents = false;
    const startedAtMs = clock.now();
    await connection.watch(path, query, options, (event) => {
      this.#apply(event as { readonly type: string; readonly object: KubernetesObject });
      this.#failures = 0;
      hasEvents = true;
    });
    if (hasEvents || clock.now() - startedAtMs >= SHORT_WATCH_MS) {
      this.#failures = 0;
      return;
    }
    // A server that ends each watch at once would be asked without end.
    this.#failures += 1;
    await this.#wait();
  }

  #apply({ type, object }: { readonly type: string; readonly object: KubernetesObject }): void {
    if (type === "ERROR") {
      const { code = 500, message = "" } = object as { code?: number; message?: string };
      throw new ApiError(code, `the watch ended with ${code}: ${message}`);
    }
    this.#resourceVersion = object.metadata?.resourceVersion ?? this.#resourceVersion;
    if (type === "BOOKMARK") return;
    const item = type === "DELETED" ? undefined : this.#options.read(object);
    if (item === undefined) {
      if (!this.#items.delete(keyOf(object))) return;
    } else keep(this.#items, object, item);
    this.#options.onChange();
  }

  /**
   * Doubles with each failure in a row. The random part keeps many clients of a server that is back
   * from asking at once.
   */
  #wait(): Promise<void> {
    const { clock, random } = this.#options;
    const { signal } = this.#closing;
    const delayMs = Math.min(FIRST_RETRY_MS * 2 ** Math.min(this.#failures - 1, 10), MAX_RETRY_MS);
    return new Promise((resolve) => {
      const timer = clock.setTimer(resolve, delayMs * (0.5 + random.next() / 2));
      signal.addEventListener(
        "abort",
        () => {
          timer.cancel();
          resolve();
        },
        { once: true },
      );
    });
  }
}

function keep<T>(items: Map<string, T>, object: KubernetesObject, item: T): void {
  const key = keyOf(object);
  if (items.size >= MAX_OBJECTS && !items.has(key))
    throw new Error(`the API server has more than ${MAX_OBJECTS} objects of a kind`);
  items.set(key, item);
}

function keyOf({ metadata }: KubernetesObject): string {
  return metadata?.uid ?? metadata?.name ?? "";
}
