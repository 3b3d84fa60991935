import { type Ambient, KvError, type Timer } from "@kv/interface";
import {
  BROKEN,
  DONE,
  DROPPED,
  type NativeAddon,
  type NativeAgent,
  type NativeAgentOptions,
  type NativeEvent,
  NOTIFICATION,
  REFUSED,
  RELEASED,
  SETTLED,
  UNREPAIRED,
} from "../addon/native.js";
import { callNative, fromNative } from "../addon/native-errors.js";
import { REPAIRS } from "../addon/repairs.js";
import { RefCount } from "../ref-count.js";
import { timerMs } from "../validate.js";
import { AgentCalls } from "./agent-calls.js";
import { DroppedNotifications } from "./agent-reports.js";
import { NotificationQueue } from "./notification-queue.js";
import { PreparedLists } from "./prepared-lists.js";
import { Registrations } from "./registrations.js";
import { Transfers } from "./transfers.js";

/** The thread's time to release everything after the timeout of `close`. It takes up to 0.2 s. */
const STUCK_MS = 5000;

export interface AgentCoreOptions {
  readonly addon: NativeAddon;
  readonly native: NativeAgentOptions;
  readonly ambient: Pick<Ambient, "clock" | "log" | "metrics">;
  /** Called once, after the agent has released everything. */
  onClose(core: AgentCore): void;
}

/**
 * The parts of an agent and its thread. It must not refer to the user's `NixlAgent`, so that the
 * transport, which keeps the core, notices when that agent is dropped.
 */
export class AgentCore {
  readonly name: string;
  readonly native: NativeAgent;
  readonly calls: AgentCalls;
  readonly registrations: Registrations;
  readonly lists: PreparedLists;
  readonly transfers: Transfers;
  readonly notifications: NotificationQueue;
  /** Resolves when the backends are ready. */
  readonly started: Promise<void>;
  readonly #options: AgentCoreOptions;
  readonly #dropped: DroppedNotifications;

  constructor(options: AgentCoreOptions) {
    const { addon, ambient } = options;
    const { name } = options.native;
    const keepAlive = new RefCount((alive) => this.native.keepAlive(alive));
    this.#options = options;
    this.name = name;
    this.calls = new AgentCalls(name, keepAlive);
    const startId = this.calls.nextId();
    this.native = callNative(() => new addon.Agent(startId, options.native, this.#onEvents));
    this.registrations = new Registrations(this.native, this.calls);
    this.lists = new PreparedLists(this.native, this.calls);
    this.#dropped = new DroppedNotifications(name, ambient);
    this.notifications = new NotificationQueue(this.native, keepAlive);
    const { native, calls, lists } = this;
    this.transfers = new Transfers({ native, calls, lists, keepAlive, clock: ambient.clock });
    this.started = this.calls.answerTo<void>(startId).catch((error: unknown) => {
      native.detach();
      throw error;
    });
  }

  close(timeoutMs: number): Promise<void> {
    return this.calls.close(() => this.#close(timeoutMs));
  }

  readonly #onEvents = (events: readonly NativeEvent[], more: boolean): void => {
    // Peers decide how many notifications come, so the event loop gets a turn between two parts.
    if (more) setImmediate(() => this.#onEvents(...this.native.takeEvents()));
    for (const [kind, callId, error, value, from] of events) {
      const failure = error === undefined ? undefined : fromNative(error);
      if (kind === DONE) this.transfers.onDone(callId, failure, value);
      else if (kind === SETTLED) this.calls.settle(callId, failure, value);
      else if (kind === RELEASED) this.transfers.onReleased(callId);
      else if (kind === NOTIFICATION) this.notifications.onArrival();
      else if (kind === DROPPED) this.#dropped.add(from, value as number);
      else if (kind === BROKEN) this.#onBroken(String(value));
      else if (kind === REFUSED) this.#onRefused(value as number);
      else if (kind === UNREPAIRED) this.#onUnrepaired(from ?? "", value);
    }
  };

  async #close(timeoutMs: number): Promise<void> {
    const { clock } = this.#options.ambient;
    const nativeMs = Math.min(timeoutMs, Number.MAX_SAFE_INTEGER);
    const closed = this.calls.make<void>((callId) => this.native.close(callId, nativeMs));
    const stuckMs = timerMs(timeoutMs, "KV_AGENT_INVALID", STUCK_MS);
    let timer: Timer | undefined;
    const stuck = new Promise<void>((resolve) => {
      if (stuckMs !== undefined) timer = clock.setTimer(resolve, stuckMs);
    }).then(() => this.#giveUp(stuckMs ?? 0));
    try {
      await Promise.race([closed, stuck]);
    } finally {
      timer?.cancel();
      this.#end();
    }
  }

  #end(): void {
    this.calls.rejectAll();
    this.notifications.close();
    this.#dropped.close();
    this.registrations.onClose();
    this.native.detach();
    this.#options.onClose(this);
  }

  /** The native thread has ended by itself and freed all its memory. */
  #onBroken(why: string): void {
    const message = `the agent ${this.name} has ended: ${why}`;
    const error = new KvError("KV_AGENT_CLOSED", message, { hint: "create another agent" });
    this.#options.ambient.log.error("nixl-agent-broken", { agent: this.name, why });
    this.transfers.endAll(error);
    if (this.calls.closing) this.calls.rejectAll();
    else void this.calls.close(async () => this.#end());
  }

  /** Only NIXL could end a call that does not return, so its thread is given up. */
  #giveUp(afterMs: number): void {
    const message = `the agent ${this.name} was closed while a call of NIXL did not return`;
    this.transfers.rejectAll(new KvError("KV_AGENT_CLOSED", message));
    this.#options.ambient.log.error("nixl-agent-stuck", {
      agent: this.name,
      why: `its thread is in a call of NIXL and did not end ${afterMs} ms after close`,
      hint: "its memory stays allocated, and `released` of its transfers does not resolve; NIXL's log on stderr may say more",
    });
  }

  /** The process refused connections of peers, also of other agents. */
  #onRefused(count: number): void {
    const { log, metrics } = this.#options.ambient;
    metrics.count("kv_nixl_connections_refused", count);
    log.error("nixl-connections-refused", {
      count,
      why: "this process has no file descriptor left for a connection of a peer, which has to try again",
      hint: "raise the limit: ulimit -n, LimitNOFILE= of a systemd unit, --ulimit nofile= of a container",
    });
  }

  #onUnrepaired(repair: string, why: unknown): void {
    this.#options.ambient.log.warn("nixl-repair-failed", {
      repair,
      why,
      effect: REPAIRS[repair]?.without,
      hint: "use the NIXL of `kv-nixl install`, in 0.10.1 to 1.5.1; `kv-nixl doctor` lists the repairs",
    });
  }
}
