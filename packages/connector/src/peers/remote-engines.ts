import { type Clock, KvError, type Timer } from "@kv/interface";
import type { LeaseReply } from "@kv/protocol";
import {
  describeEngine,
  type EngineAddress,
  engineKey,
  type RemoteRequest,
} from "../requests/remote-request.js";
import { traced } from "./background-work.js";
import { queryLease } from "./messages.js";
import { isPeerLost, staleProcess, unknownRegistration } from "./peer-errors.js";
import {
  type EngineReference,
  type EngineRequest,
  type OpenEngine,
  type OpenedEngine,
  openEngine,
  type PeerContext,
  type RemoteEngine,
  type RemoteEnginesOptions,
} from "./remote-engine.js";

/**
 * Time between two handshakes beside an open engine that changed nothing. A request that asks for
 * one waits for so long.
 */
const RENEWAL_INTERVAL_MS = 1000;
/**
 * How often one request may cause a handshake beside an open engine: the first may have begun
 * before P registered again.
 */
const RENEWALS = 2;
/** Confirmed generations that an entry remembers. */
const MAX_CONFIRMED = 16;

/** An address, with the process that a request names. */
type NamedEngine = EngineAddress & Pick<EngineRequest, "lease">;

/** An engine of the table, from the start of its opening until it is closed. */
interface Entry<Engine extends OpenEngine> {
  readonly key: string;
  readonly address: EngineAddress;
  readonly opening: Promise<OpenedEngine<Engine>>;
  opened: OpenedEngine<Engine> | undefined;
  references: number;
  lastUsedMs: number;
  ttlTimer?: Timer | undefined;
  renewal?: Promise<void> | undefined;
  renewableAtMs: number;
  /**
   * Registration generations that requests named and that a handshake has confirmed, for engines
   * that do not send their own.
   */
  readonly confirmed: Set<number>;
  /**
   * Set when the entry has left the table: it closes with its last reference, and then ends the
   * wait of `close()`.
   */
  closed?: () => void;
}

/**
 * The remote engines of a worker. Each is opened once, at first use, and shared by all requests
 * with the same address. It is closed when it was unused for `engine_ttl`, when another engine
 * answers at its host and port, or when it was dropped as stale; always after its last reference,
 * because prepared lists and remote agents must outlive the transfers that use them. What a request
 * says about an engine never drops it: at most it causes another handshake at the same address,
 * beside the open engine, and only what answers there replaces it.
 */
export class RemoteEngines<Engine extends OpenEngine = RemoteEngine> {
  readonly #context: PeerContext;
  readonly #options: RemoteEnginesOptions<Engine>;
  readonly #entries = new Map<string, Entry<Engine>>();
  /** Open entries by host and port, to find those that another engine replaces. */
  readonly #byHostPort = new Map<string, Set<Entry<Engine>>>();
  readonly #closing = new Map<Entry<Engine>, Promise<void>>();
  readonly #backoff: PeerBackoff;
  readonly #renewals = new Set<Promise<void>>();
  #closed = false;

  constructor(context: PeerContext, options: RemoteEnginesOptions<Engine>) {
    this.#context = context;
    this.#options = options;
    this.#backoff = new PeerBackoff(context.clock);
  }

  /**
   * Returns the engine, if it is still the process that the request names. Requests and open
   * engines can both outlive that process. A request that names a process is not served by an
   * engine that does not: it could not be asked for the lease. Records a span of the handshake,
   * unless `isTraced` is false.
   * @throws The errors of `open`; `KV_GENERATION_STALE` when the process is gone.
   */
  async acquire(
    request: EngineRequest,
    signal?: AbortSignal,
    isTraced = true,
  ): Promise<EngineReference<Engine>> {
    const { role } = this.#options;
    for (let isSecondTry = false; ; isSecondTry = true) {
      const reference = await this.#openTraced(request, signal, isTraced);
      const { engine } = reference;
      if (isMeant(engine, request)) return reference;
      reference.release();
      if (isSecondTry) throw staleProcess(request, role);
      // A lease query is cheaper than a handshake. vLLM's listener would stop at one.
      if (role === "prefill" && engine.incarnation !== undefined) {
        const { incarnation } = await this.queryLease(request, signal);
        if (incarnation === engine.incarnation) throw staleProcess(request, role);
      }
      // Only what answers a handshake at the address replaces the open engine, not what this
      // request says.
      const entry = this.#entries.get(engineKey(request));
      if (entry?.opened?.engine === engine)
        await whileNotAborted(this.#renew(entry, entry.address), signal);
    }
  }

  /**
   * Returns the engine at an address, whichever process it is, and opens it first if it is not
   * open. When `signal` aborts, the call rejects with its reason, and a reference that arrives
   * later is released.
   * @throws The errors of `openEngine`; `KV_HANDSHAKE_BACKED_OFF` during the back-off after a
   * failure; `KV_GENERATION_STALE` for a `registrationGeneration` that the engine does not have;
   * `KV_SIDE_CHANNEL_CLOSED` after `close`; the signal's reason.
   */
  open(address: NamedEngine, signal?: AbortSignal): Promise<EngineReference<Engine>> {
    return whileNotAborted(this.#open(address), signal, (reference) => reference.release());
  }

  /**
   * The engine if it is open; counts as a use. Without a reference it may be closed at the next
   * `await`.
   */
  peek(address: EngineAddress): Engine | undefined {
    const entry = this.#entries.get(engineKey(address));
    if (entry?.opened !== undefined) entry.lastUsedMs = this.#context.clock.now();
    return entry?.opened?.engine;
  }

  /**
   * Removes an engine that is known to be stale (it is gone, or another process has its address).
   * The next `open` opens it again; existing references stay valid. Without effect when the engine
   * was removed before.
   */
  drop(engine: Engine, reason: string): void {
    const entry = this.#entries.get(engineKey(engine.address));
    if (entry?.opened?.engine === engine) this.#drop(entry, reason);
  }

  /** As `drop`, where the error of a transfer means that the engine is gone. */
  dropIfLost(engine: Engine, error: KvError): void {
    if (isPeerLost(error)) this.drop(engine, error.message);
  }

  /**
   * Asks the process at the request's address whether it holds the request's blocks.
   * @throws As the function `queryLease`.
   */
  queryLease(request: EngineRequest, signal?: AbortSignal): Promise<LeaseReply> {
    const { engineId, requestId, host, port, lease, blocks, prompt, traceparent } = request;
    const { sideChannel, settings, tracer } = this.#context;
    const { generation, capability } = lease ?? {};
    const query = { engineId, requestId, generation, capability, blocks, prompt };
    const timeoutMs = settings.handshakeTimeoutMs;
    return traced(tracer, "kv.lease_query", { parent: traceparent, kind: "client" }, () =>
      queryLease(query, { sideChannel, host, port, timeoutMs, signal }),
    );
  }

  /**
   * Sends notifications about a request to the process that prefilled it, in the background. `send`
   * is called once the engine is open, unless another process has its address. `failed` gets the
   * error of the handshake or of `send`.
   */
  async notify(
    request: RemoteRequest,
    send: (engine: Engine) => void,
    failed: (error: unknown) => void,
  ): Promise<void> {
    try {
      const { engine, release } = await this.open(request);
      try {
        if (isMeant(engine, request)) send(engine);
      } finally {
        release();
      }
    } catch (error) {
      failed(error);
    }
  }

  /** Numbers of engines that are open, being opened, and dropped but still referenced. */
  outstanding(): { readonly peers: number; readonly opening: number; readonly closing: number } {
    const entries = [...this.#entries.values()];
    const peers = entries.filter(({ opened }) => opened !== undefined).length;
    const renewing = entries.filter(({ renewal }) => renewal !== undefined).length;
    return { peers, opening: entries.length - peers + renewing, closing: this.#closing.size };
  }

  /**
   * Closes every engine after its last reference. `open` rejects from now on with
   * `KV_SIDE_CHANNEL_CLOSED`.
   */
  async close(): Promise<void> {
    this.#closed = true;
    for (const entry of [...this.#entries.values()]) this.#drop(entry, "the worker closes");
    await Promise.allSettled(this.#renewals);
    await Promise.all(this.#closing.values());
  }

  /**
   * As `open`, with a span where the engine is not open: a handshake, or the wait for one that
   * another request began.
   */
  #openTraced(
    request: EngineRequest,
    signal: AbortSignal | undefined,
    isTraced: boolean,
  ): Promise<EngineReference<Engine>> {
    const { tracer } = this.#context;
    if (!isTraced || tracer === undefined || this.peek(request) !== undefined)
      return this.open(request, signal);
    const { engineId, host, port, traceparent: parent } = request;
    const attributes = {
      "kv.remote_engine_id": engineId,
      "server.address": host,
      "server.port": port,
    };
    return traced(tracer, "kv.handshake", { parent, kind: "client", attributes }, () =>
      this.open(request, signal),
    );
  }

  async #open(address: NamedEngine): Promise<EngineReference<Engine>> {
    const key = engineKey(address);
    for (let attempt = 0; ; attempt += 1) {
      if (this.#closed) {
        const message = `${describeEngine(address)} is not opened: the worker is closed`;
        throw new KvError("KV_SIDE_CHANNEL_CLOSED", message);
      }
      let entry = this.#entries.get(key);
      if (entry === undefined) {
        this.#backoff.check(address, address.lease?.incarnation);
        entry = this.#begin(key, address);
      }
      const held = entry;
      held.references += 1;
      let released = false;
      const release = () => {
        if (released) return;
        released = true;
        this.#release(held);
      };
      try {
        const { engine } = await held.opening;
        const asked = attempt >= RENEWALS;
        if (hasRegistration(held, engine, address, asked)) {
          if (held.confirmed.size === 0) confirm(held, address.registrationGeneration);
          return { engine, release };
        }
        if (asked) throw unknownRegistration(address, engine);
      } catch (error) {
        release();
        throw error;
      }
      release();
      await this.#renew(held, address);
    }
  }

  #handshake(address: EngineAddress): Promise<OpenedEngine<Engine>> {
    return openEngine(this.#context, address, this.#options);
  }

  #failed({ engineId, host, port }: EngineAddress, error: unknown): void {
    this.#context.metrics.handshakeFailed();
    this.#context.log.warn(this.#options.failureType, {
      engineId,
      host,
      port,
      error: String(error),
    });
  }

  #begin(key: string, address: NamedEngine): Entry<Engine> {
    const entry = this.#entryOf(key, address, this.#handshake(address));
    this.#entries.set(key, entry);
    entry.opening.then(
      (opened) => {
        this.#backoff.succeeded(address);
        this.#keep(entry, opened);
      },
      (error: unknown) => {
        this.#failed(address, error);
        const why = KvError.from(
          error,
          "KV_HANDSHAKE_REFUSED",
          `handshake with ${describeEngine(address)}`,
        );
        this.#backoff.failed(address, why, address.lease?.incarnation);
        if (this.#entries.get(key) === entry) this.#entries.delete(key);
        entry.closed?.();
      },
    );
    return entry;
  }

  #entryOf(
    key: string,
    address: EngineAddress,
    opening: Promise<OpenedEngine<Engine>>,
  ): Entry<Engine> {
    const nowMs = this.#context.clock.now();
    return {
      key,
      address,
      opening,
      opened: undefined,
      references: 0,
      lastUsedMs: nowMs,
      renewableAtMs: nowMs,
      confirmed: new Set<number>(),
    };
  }

  /**
   * Shakes hands again at an entry's address. Concurrent callers share a handshake. A failure
   * leaves the entry as it is.
   */
  #renew(entry: Entry<Engine>, claimed: EngineAddress): Promise<void> {
    if (entry.renewal === undefined) {
      const renewal = this.#openBeside(entry, claimed).finally(() => {
        entry.renewal = undefined;
        this.#renewals.delete(renewal);
      });
      entry.renewal = renewal;
      this.#renewals.add(renewal);
    }
    return entry.renewal;
  }

  /**
   * Replaces an entry if another handshake finds another engine. One that changes nothing is not
   * repeated for a second.
   */
  async #openBeside(
    entry: Entry<Engine>,
    { registrationGeneration }: EngineAddress,
  ): Promise<void> {
    const { clock } = this.#context;
    const waitMs = Math.ceil(entry.renewableAtMs - clock.now());
    if (waitMs > 0)
      await new Promise<void>((resolve) => void clock.setTimer(resolve, waitMs, { ref: true }));
    const before = entry.opened?.engine;
    const isGone = () => this.#closed || this.#entries.get(entry.key) !== entry;
    if (before === undefined || isGone()) return;
    try {
      const opened = await this.#handshake({ ...entry.address, registrationGeneration });
      const { address, fingerprint } = opened.engine;
      const isSame = fingerprint !== undefined && fingerprint === before.fingerprint;
      if (isSame || isGone()) {
        if (isSame) confirm(entry, registrationGeneration);
        await opened.close();
      } else {
        this.#drop(entry, "another handshake at its address gave other metadata");
        this.#keep(this.#entryOf(entry.key, address, Promise.resolve(opened)), opened);
      }
    } catch (error) {
      this.#failed(entry.address, error);
      throw error;
    } finally {
      entry.renewableAtMs = clock.now() + RENEWAL_INTERVAL_MS;
    }
  }

  #keep(entry: Entry<Engine>, opened: OpenedEngine<Engine>): void {
    entry.opened = opened;
    entry.lastUsedMs = this.#context.clock.now();
    confirm(entry, entry.address.registrationGeneration);
    if (entry.closed !== undefined) this.#closeUnreferenced(entry);
    else {
      this.#entries.set(entry.key, entry);
      this.#replaceOthersAt(entry);
      this.#startTtl(entry);
    }
  }

  /** Drops the engines with another id at the same host and port: their process is gone. */
  #replaceOthersAt(entry: Entry<Engine>): void {
    const { engineId, host, port } = entry.address;
    const hostPort = `${host}:${port}`;
    const others = this.#byHostPort.get(hostPort) ?? new Set();
    for (const other of [...others]) {
      if (other.address.engineId !== engineId)
        this.#drop(other, `engine ${engineId} answers at ${hostPort}`);
    }
    this.#byHostPort.set(hostPort, others.add(entry));
  }

  #drop(entry: Entry<Engine>, reason: string): void {
    const { engineId, host, port } = entry.address;
    this.#entries.delete(entry.key);
    const atHostPort = this.#byHostPort.get(`${host}:${port}`);
    atHostPort?.delete(entry);
    if (atHostPort?.size === 0) this.#byHostPort.delete(`${host}:${port}`);
    entry.ttlTimer?.cancel();
    this.#context.log.info("peer-dropped", { engineId, reason, references: entry.references });
    const closed = new Promise<void>((resolve) => {
      entry.closed = resolve;
    });
    this.#closing.set(entry, closed);
    void closed.then(() => this.#closing.delete(entry));
    this.#closeUnreferenced(entry);
  }

  #release(entry: Entry<Engine>): void {
    entry.references -= 1;
    entry.lastUsedMs = this.#context.clock.now();
    if (entry.closed === undefined) this.#startTtl(entry);
    else this.#closeUnreferenced(entry);
  }

  /** Closes a dropped entry when it is open and has no references. */
  #closeUnreferenced(entry: Entry<Engine>): void {
    const { opened, closed, references } = entry;
    if (closed === undefined || references > 0 || opened === undefined) return;
    entry.opened = undefined;
    void opened.close().then(closed);
  }

  #startTtl(entry: Entry<Engine>): void {
    const { clock, settings } = this.#context;
    const { engineTtlMs } = settings;
    if (entry.opened === undefined || entry.references > 0 || entry.ttlTimer !== undefined) return;
    if (engineTtlMs <= 0) return;
    const delayMs = Math.max(0, Math.ceil(entry.lastUsedMs + engineTtlMs - clock.now()));
    entry.ttlTimer = clock.setTimer(() => {
      entry.ttlTimer = undefined;
      if (entry.references > 0) return;
      if (clock.now() - entry.lastUsedMs >= engineTtlMs)
        this.#drop(entry, "it was not used for engine_ttl");
      else this.#startTtl(entry);
    }, delayMs);
  }
}

/** Whether the engine is the process that the request names. Requests of vLLM name no process. */
function isMeant({ incarnation }: OpenEngine, { lease }: EngineRequest): boolean {
  return lease === undefined || incarnation === lease.incarnation;
}

/**
 * Whether the open engine has the registration that the parameters of a request name. `asked`:
 * further handshakes would not help.
 */
function hasRegistration(
  { confirmed }: Pick<Entry<OpenEngine>, "confirmed">,
  { registrationGeneration: known }: OpenEngine,
  { registrationGeneration: named }: EngineAddress,
  asked: boolean,
): boolean {
  if (named === undefined) return true;
  if (known !== undefined) return named <= known;
  // vLLM's handshake does not say it. Once another handshake has given the same metadata, the open
  // engine is current, whatever was named.
  return asked || confirmed.size === 0 || confirmed.has(named);
}

/** Records a generation that a handshake has confirmed. */
function confirm(
  { confirmed }: Pick<Entry<OpenEngine>, "confirmed">,
  generation: number | undefined,
): void {
  if (generation === undefined) return;
  confirmed.add(generation);
  const [oldest] = confirmed;
  if (confirmed.size > MAX_CONFIRMED && oldest !== undefined) confirmed.delete(oldest);
}

/**
 * Rejects with the signal's reason as soon as it aborts. A result that arrives after that is given
 * to `unwanted`.
 * @throws The errors of `work`; the signal's reason.
 */
function whileNotAborted<T>(
  work: Promise<T>,
  signal: AbortSignal | undefined,
  unwanted?: (result: T) => void,
): Promise<T> {
  if (signal === undefined) return work;
  return new Promise((resolve, reject) => {
    const onAbort = () => reject(signal.reason as Error);
    if (signal.aborted) onAbort();
    else signal.addEventListener("abort", onAbort);
    work.then(
      (result) => {
        signal.removeEventListener("abort", onAbort);
        if (signal.aborted) unwanted?.(result);
        else resolve(result);
      },
      (error: unknown) => {
        signal.removeEventListener("abort", onAbort);
        reject(error as Error);
      },
    );
  });
}

/**
 * Addresses that are remembered at most: requests name addresses, so their number is not bounded by
 * the peers that exist.
 */
const MAX_FAILURES = 4096;
const MAX_BACKOFF_MS = 60_000;

interface Failure {
  readonly delayMs: number;
  readonly untilMs: number;
  readonly error: KvError;
  /** The process that the request named; undefined where it named none. */
  readonly incarnation: string | undefined;
}

/**
 * Limits how often an unreachable peer is tried: after 1 s, then after twice the previous delay, up
 * to 60 s (vLLM 0.33). A request that names another process than the one that was not reached is
 * tried at once: it says that the peer was started again.
 */
class PeerBackoff {
  readonly #clock: Clock;
  readonly #failures = new Map<string, Failure>();

  constructor(clock: Clock) {
    this.#clock = clock;
  }

  /**
   * @throws `KV_HANDSHAKE_BACKED_OFF`, with the last failure as its cause, while the peer's delay
   * runs.
   */
  check(address: EngineAddress, incarnation?: string): void {
    const failure = this.#failures.get(engineKey(address));
    if (failure === undefined) return;
    if (incarnation !== undefined && incarnation !== failure.incarnation) return;
    const leftMs = failure.untilMs - this.#clock.now();
    if (leftMs <= 0) return;
    const peer = describeEngine(address);
    throw new KvError(
      "KV_HANDSHAKE_BACKED_OFF",
      `${peer} is not tried again for ${Math.ceil(leftMs)} ms, after: ${failure.error.message}`,
      { cause: failure.error, details: { peer, leftMs, delayMs: failure.delayMs } },
    );
  }

  failed(address: EngineAddress, error: KvError, incarnation?: string): void {
    const nowMs = this.#clock.now();
    // A peer that was not requested for the longest delay starts at the first delay again. This
    // limits the table without a timer.
    for (const [key, { untilMs }] of this.#failures)
      if (nowMs - untilMs > MAX_BACKOFF_MS) this.#failures.delete(key);
    const key = engineKey(address);
    const before = this.#failures.get(key);
    const delayMs = before === undefined ? 1000 : Math.min(before.delayMs * 2, MAX_BACKOFF_MS);
    this.#failures.delete(key);
    this.#failures.set(key, { delayMs, untilMs: nowMs + delayMs, error, incarnation });
    const [oldest] = this.#failures.keys();
    if (this.#failures.size > MAX_FAILURES && oldest !== undefined) this.#failures.delete(oldest);
  }

  succeeded(address: EngineAddress): void {
    this.#failures.delete(engineKey(address));
  }
}
