import { type Clock, KvError, type Timer } from "@kv/interface";
import type { LeaseReply } from "@kv/protocol";
import {
  describeEngine,
  type EngineAddress,
  engineKey,
  type RemoteRequest,
} from "../requests/references.js";
import { queryLease } from "./messages.js";
import {
  type EngineReference,
  type EngineRequest,
  type OpenEngine,
  type OpenedEngine,
  openEngine,
  type PeerContext,
  type RefusedEngine,
  type RemoteEngine,
  type RemoteEnginesOptions,
} from "./remote-engine.js";
import { traced } from "./transfers.js";

/** Time between handshakes that find an open engine unchanged. */
const RENEWAL_INTERVAL_MS = 1000;
/** How long a refusal is believed: a P or D with another configuration may take its place. */
const REFUSED_MS = 10_000;
/** A request may need two: the first may have begun before P registered again. */
const RENEWALS = 2;
const MAX_CONFIRMED = 16;

type NamedEngine = EngineAddress & Pick<EngineRequest, "lease">;

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
  /** Registrations confirmed by a handshake, of engines that do not send their own number. */
  readonly confirmed: Set<number>;
  /** Set once the entry has left the table: it closes with its last reference. */
  closed?: () => void;
}

/**
 * The remote engines of a worker, one per address for all requests. One closes after `engine_ttl`
 * without use, when another engine answers there, or when it is dropped as stale, but never before
 * its last reference: lists and agents must outlive their transfers. A request's claims never drop
 * an engine: they only cause a handshake, and what answers replaces it.
 */
export class RemoteEngines<Engine extends OpenEngine = RemoteEngine> {
  readonly #context: PeerContext;
  readonly #options: RemoteEnginesOptions<Engine>;
  readonly #entries = new Map<string, Entry<Engine>>();
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
   * Returns the engine if it is the process that the request names, and can be asked for the lease.
   * @throws The errors of `open`; `KV_GENERATION_STALE` when the process is gone.
   */
  async acquire(request: EngineRequest, signal?: AbortSignal): Promise<EngineReference<Engine>> {
    return notRefused(await this.reach(request, signal));
  }

  /**
   * As `acquire`, but also an engine that is refused, which can only be notified.
   * @throws As `acquire`, but for the refusal.
   */
  async reach(
    request: EngineRequest,
    signal?: AbortSignal,
    isTraced = true,
  ): Promise<EngineReference<Engine | RefusedEngine>> {
    const { role } = this.#options;
    for (let isSecondTry = false; ; isSecondTry = true) {
      const reference = await this.#openTraced(request, signal, isTraced);
      const { engine } = reference;
      if (isMeant(engine, request)) return reference;
      reference.release();
      if (isSecondTry) throw staleProcess(request, role);
      // A query costs less than a handshake, but would stop vLLM's listener.
      if (role === "prefill" && engine.incarnation !== undefined) {
        const { incarnation } = await this.queryLease(request, signal);
        if (incarnation === engine.incarnation) throw staleProcess(request, role);
      }
      // Only a handshake's answer replaces an engine, not a request's claim.
      const entry = this.#entries.get(engineKey(request));
      if (entry?.opened?.engine === engine)
        await whileNotAborted(this.#renew(entry, entry.address), signal);
    }
  }

  /**
   * Returns the engine at an address, whichever process it is, and opens it if needed.
   * @throws The errors of `openEngine`; why the engine is refused; `KV_HANDSHAKE_BACKED_OFF`;
   * `KV_GENERATION_STALE` for a `registrationGeneration` that the engine does not have;
   * `KV_SIDE_CHANNEL_CLOSED` after `close`.
   */
  async open(address: NamedEngine): Promise<EngineReference<Engine>> {
    return notRefused(await this.#open(address));
  }

  /** Counts as a use, but the engine may close at the next `await`. */
  peek(address: EngineAddress): Engine | undefined {
    const entry = this.#entries.get(engineKey(address));
    const engine = entry?.opened?.engine;
    if (entry === undefined || engine === undefined || isRefused(engine)) return undefined;
    entry.lastUsedMs = this.#context.clock.now();
    return engine;
  }

  /** Removes a stale engine. The next `open` opens it again; references stay valid. */
  drop(engine: Engine, reason: string): void {
    const entry = this.#entries.get(engineKey(engine.address));
    if (entry?.opened?.engine === engine) this.#drop(entry, reason);
  }

  /** Acts only on errors that mean that the engine is gone. */
  dropIfLost(engine: Engine, error: KvError): void {
    if (isPeerLost(error)) this.drop(engine, error.message);
  }

  /** @throws As the function `queryLease`. */
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
   * Calls `send` once the process that prefilled the request has answered, even if it is refused.
   * `failed` gets errors of the handshake and of `send`.
   */
  async notify(
    request: RemoteRequest,
    send: (engine: Engine | RefusedEngine) => void,
    failed: (error: unknown) => void,
  ): Promise<void> {
    try {
      const { engine, release } = await this.#open(request);
      try {
        if (isMeant(engine, request)) send(engine);
      } finally {
        release();
      }
    } catch (error) {
      failed(error);
    }
  }

  /** `closing`: dropped but still referenced. */
  outstanding(): Record<"peers" | "opening" | "closing" | "references", number> {
    const entries = [...this.#entries.values()];
    const peers = entries.filter(({ opened }) => opened !== undefined).length;
    const renewing = entries.filter(({ renewal }) => renewal !== undefined).length;
    const references = entries.reduce((sum, entry) => sum + entry.references, 0);
    const opening = entries.length - peers + renewing;
    return { peers, opening, closing: this.#closing.size, references };
  }

  /** Closes every engine after its last reference. `open` rejects from now on. */
  async close(): Promise<void> {
    this.#closed = true;
    for (const entry of [...this.#entries.values()]) this.#drop(entry, "the worker closes");
    await Promise.allSettled(this.#renewals);
    await Promise.all(this.#closing.values());
  }

  #openTraced(
    request: EngineRequest,
    signal: AbortSignal | undefined,
    isTraced: boolean,
  ): Promise<EngineReference<Engine | RefusedEngine>> {
    const { tracer } = this.#context;
    const opened = () =>
      whileNotAborted(this.#open(request), signal, (reference) => reference.release());
    if (!isTraced || tracer === undefined || this.peek(request) !== undefined) return opened();
    const { engineId, host, port, traceparent: parent } = request;
    const attributes = {
      "kv.remote_engine_id": engineId,
      "server.address": host,
      "server.port": port,
    };
    return traced(tracer, "kv.handshake", { parent, kind: "client", attributes }, opened);
  }

  async #open(address: NamedEngine): Promise<EngineReference<Engine | RefusedEngine>> {
    const key = engineKey(address);
    for (let attempt = 0; ; attempt += 1) {
      if (this.#closed) {
        const message = `${describeEngine(address)} is not opened: the worker is closed`;
        throw new KvError("KV_SIDE_CHANNEL_CLOSED", message);
      }
      let entry = this.#entries.get(key);
      if (entry === undefined) {
        this.#backoff.check(address);
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

  #failed({ engineId, host, port }: EngineAddress, error: unknown): void {
    this.#context.metrics.handshakeFailed();
    const fields = { engineId, host, port, error: String(error) };
    this.#context.log.warn(this.#options.failureType, fields);
  }

  #begin(key: string, address: NamedEngine): Entry<Engine> {
    const opening = openEngine(this.#context, address, this.#options);
    const entry = this.#entryOf(key, address, opening);
    this.#entries.set(key, entry);
    entry.opening.then(
      (opened) => {
        this.#backoff.succeeded(address);
        this.#keep(entry, opened);
      },
      (error: unknown) => {
        this.#failed(address, error);
        const what = `handshake with ${describeEngine(address)}`;
        this.#backoff.failed(address, KvError.from(error, "KV_HANDSHAKE_REFUSED", what));
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

  /** Repeats the handshake, once for concurrent callers. A failure changes nothing. */
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
      const claimed = { ...entry.address, registrationGeneration };
      const opened = await openEngine(this.#context, claimed, this.#options);
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
    if (isRefused(opened.engine)) this.#failed(entry.address, opened.engine.refusal);
    entry.lastUsedMs = this.#context.clock.now();
    confirm(entry, entry.address.registrationGeneration);
    if (entry.closed !== undefined) this.#closeUnreferenced(entry);
    else {
      this.#entries.set(entry.key, entry);
      this.#replaceOthersAt(entry);
      this.#startTtl(entry);
    }
  }

  /** The process before it at the same host and port is gone. */
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
    const isKept = entry.opened !== undefined && !isRefused(entry.opened.engine);
    if (isKept) entry.lastUsedMs = this.#context.clock.now();
    if (entry.closed === undefined) this.#startTtl(entry);
    else this.#closeUnreferenced(entry);
  }

  #closeUnreferenced(entry: Entry<Engine>): void {
    const { opened, closed, references } = entry;
    if (closed === undefined || references > 0 || opened === undefined) return;
    entry.opened = undefined;
    void opened.close().then(closed);
  }

  #startTtl(entry: Entry<Engine>): void {
    const { clock, settings } = this.#context;
    if (entry.opened === undefined || entry.references > 0 || entry.ttlTimer !== undefined) return;
    const refused = isRefused(entry.opened.engine);
    const engineTtlMs = refused ? REFUSED_MS : settings.engineTtlMs;
    if (engineTtlMs <= 0) return;
    const delayMs = Math.max(0, Math.ceil(entry.lastUsedMs + engineTtlMs - clock.now()));
    entry.ttlTimer = clock.setTimer(() => {
      entry.ttlTimer = undefined;
      if (entry.references > 0) return;
      if (clock.now() - entry.lastUsedMs >= engineTtlMs)
        this.#drop(entry, refused ? "it was refused" : "it was not used for engine_ttl");
      else this.#startTtl(entry);
    }, delayMs);
  }
}

/** Whether an engine has answered and does not fit. Throws nothing. */
export function isRefused(engine: OpenEngine | RefusedEngine): engine is RefusedEngine {
  return "refusal" in engine;
}

/** @throws Why the engine is refused; then the reference is released. */
function notRefused<Engine extends OpenEngine>({
  engine,
  release,
}: EngineReference<Engine | RefusedEngine>): EngineReference<Engine> {
  if (!isRefused(engine)) return { engine, release };
  release();
  throw engine.refusal;
}

/** vLLM's requests name no process. */
function isMeant({ incarnation }: OpenEngine, { lease }: EngineRequest): boolean {
  return lease === undefined || incarnation === lease.incarnation;
}

/** `asked`: further handshakes would not help. */
function hasRegistration(
  { confirmed }: { readonly confirmed: ReadonlySet<number> },
  { registrationGeneration: known }: OpenEngine,
  { registrationGeneration: named }: EngineAddress,
  asked: boolean,
): boolean {
  if (named === undefined) return true;
  if (known !== undefined) return named <= known;
  // vLLM's handshake does not say it. A second one with equal metadata proves the engine current.
  return asked || confirmed.size === 0 || confirmed.has(named);
}

function confirm(
  { confirmed }: { readonly confirmed: Set<number> },
  generation: number | undefined,
): void {
  if (generation !== undefined) confirmed.add(generation);
  const [oldest] = confirmed;
  if (confirmed.size > MAX_CONFIRMED && oldest !== undefined) confirmed.delete(oldest);
}

/**
 * Rejects as soon as the signal aborts; `unwanted` gets a later result.
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

/** Requests may name any number of addresses. */
const MAX_FAILURES = 4096;
const MAX_BACKOFF_MS = 60_000;

interface Failure {
  readonly delayMs: number;
  readonly untilMs: number;
  readonly error: KvError;
  readonly incarnation: string | undefined;
}

/**
 * Retries an unreachable peer after 1 s, doubling up to 60 s (vLLM 0.33). A request that names
 * another process tries at once: the peer has restarted.
 */
class PeerBackoff {
  readonly #clock: Clock;
  readonly #failures = new Map<string, Failure>();

  constructor(clock: Clock) {
    this.#clock = clock;
  }

  /** @throws `KV_HANDSHAKE_BACKED_OFF`, with the last failure as its cause. */
  check(address: NamedEngine): void {
    const failure = this.#failures.get(engineKey(address));
    if (failure === undefined) return;
    const incarnation = address.lease?.incarnation;
    if (incarnation !== undefined && incarnation !== failure.incarnation) return;
    const { untilMs, delayMs, error: cause } = failure;
    const leftMs = untilMs - this.#clock.now();
    if (leftMs <= 0) return;
    const peer = describeEngine(address);
    throw new KvError(
      "KV_HANDSHAKE_BACKED_OFF",
      `${peer} is not tried again for ${Math.ceil(leftMs)} ms, after: ${cause.message}`,
      { cause, details: { peer, leftMs, delayMs } },
    );
  }

  failed(address: NamedEngine, error: KvError): void {
    const nowMs = this.#clock.now();
    // Peers not asked for within the longest delay. This limits the table without a timer.
    for (const [key, { untilMs }] of this.#failures)
      if (nowMs - untilMs > MAX_BACKOFF_MS) this.#failures.delete(key);
    const key = engineKey(address);
    const before = this.#failures.get(key);
    const delayMs = before === undefined ? 1000 : Math.min(before.delayMs * 2, MAX_BACKOFF_MS);
    this.#failures.delete(key);
    const incarnation = address.lease?.incarnation;
    this.#failures.set(key, { delayMs, untilMs: nowMs + delayMs, error, incarnation });
    const [oldest] = this.#failures.keys();
    if (this.#failures.size > MAX_FAILURES && oldest !== undefined) this.#failures.delete(oldest);
  }

  succeeded(address: EngineAddress): void {
    this.#failures.delete(engineKey(address));
  }
}

const PEER_LOST: readonly string[] = [
  "KV_PEER_DISCONNECTED",
  "KV_AGENT_UNKNOWN_REMOTE",
  "KV_TRANSFER_FAILED",
  "KV_TRANSFER_TIMEOUT",
  "KV_NOTIFICATION_FAILED",
];

function isPeerLost(error: KvError): boolean {
  return PEER_LOST.includes(error.code);
}

function staleProcess(
  { engineId, requestId, host, port }: EngineRequest,
  role: "prefill" | "decode",
): KvError {
  const another = `another process answers at ${host}:${port}`;
  if (role === "decode") {
    return new KvError(
      "KV_GENERATION_STALE",
      `the process of engine ${engineId} that registered request ${requestId} has gone; ${another}`,
    );
  }
  return new KvError(
    "KV_GENERATION_STALE",
    `request ${requestId} was computed by a process of engine ${engineId} that is gone; ${another}`,
    {
      hint: "send the prompt to a prefill worker again",
      details: { engineId, requestId, host, port },
    },
  );
}

function unknownRegistration(
  address: EngineAddress,
  engine: Pick<OpenEngine, "registrationGeneration">,
): KvError {
  const [named, found] = [address.registrationGeneration, engine.registrationGeneration];
  return new KvError(
    "KV_GENERATION_STALE",
    `kv_transfer_params name registration ${named} of the KV cache of ${describeEngine(address)}, which has registered it ${found} times`,
    {
      hint: "pass the kv_transfer_params of the prefill answer on unchanged",
      details: { named, found },
    },
  );
}
