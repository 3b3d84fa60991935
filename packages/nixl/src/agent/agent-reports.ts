import type { Ambient, Timer } from "@kv/interface";
import { REFUSED, UNKNOWN_UCX } from "../addon/native.js";

/** A warning comes at most this often. */
const REPORT_INTERVAL_MS = 10_000;
/** Senders that one warning names. */
const MAX_NAMED = 16;

/**
 * Counts notifications that were dropped, and logs how many and from whom: the first time at once,
 * then every 10 s at most.
 */
export class DroppedNotifications {
  readonly #agent: string;
  readonly #ambient: Pick<Ambient, "clock" | "log" | "metrics">;
  readonly #bySender = new Map<string, number>();
  #others = 0;
  #total = 0;
  #quietUntilMs = Number.NEGATIVE_INFINITY;
  #timer: Timer | undefined;

  /** `agent` is the receiver, for the log. */
  constructor(agent: string, ambient: Pick<Ambient, "clock" | "log" | "metrics">) {
    this.#agent = agent;
    this.#ambient = ambient;
  }

  /** Counts notifications of a sender; without a name, of several. */
  add(from: string | undefined, count = 1): void {
    const { clock, metrics } = this.#ambient;
    this.#total += count;
    metrics.count("kv_nixl_notifications_dropped", count);
    const isNamed =
      from !== undefined && (this.#bySender.has(from) || this.#bySender.size < MAX_NAMED);
    if (isNamed) this.#bySender.set(from, (this.#bySender.get(from) ?? 0) + count);
    else this.#others += count;
    // In a later turn at the earliest, so that one warning has everything that was dropped at once.
    this.#timer ??= clock.setTimer(
      () => this.#report(),
      Math.max(0, this.#quietUntilMs - clock.now()),
    );
  }

  /** Logs what was not logged yet. */
  close(): void {
    if (this.#timer === undefined) return;
    this.#timer.cancel();
    this.#report();
  }

  #report(): void {
    const { clock, log } = this.#ambient;
    this.#timer = undefined;
    this.#quietUntilMs = clock.now() + REPORT_INTERVAL_MS;
    log.warn("nixl-notifications-dropped", {
      agent: this.#agent,
      senders: Object.fromEntries(this.#bySender),
      otherSenders: this.#others,
      total: this.#total,
      why: "too many notifications wait for a reader; a sender states its name itself",
    });
    this.#bySender.clear();
    this.#others = 0;
  }
}

/**
 * Logs what an agent's thread reports of the whole process: connections of peers that were refused,
 * or that UCX is not one that the addon knows.
 */
export function reportOfProcess(
  { log, metrics }: Pick<Ambient, "log" | "metrics">,
  kind: number,
  value: unknown,
): void {
  if (kind === REFUSED) {
    const count = value as number;
    metrics.count("kv_nixl_connections_refused", count);
    log.error("nixl-connections-refused", {
      count,
      why: "this process has no file descriptor left for a connection of a peer, which has to try again",
      hint: "raise the limit: ulimit -n, LimitNOFILE= of a systemd unit, --ulimit nofile= of a container",
    });
  } else if (kind === UNKNOWN_UCX)
    log.warn("nixl-ucx-unknown", {
      why: "UCX is not one of those that the addon knows, or is loaded twice: a peer that dies while it reads over TCP may end this process with SIGABRT or SIGSEGV",
      hint: "use the NIXL of `kv-nixl install`, in 0.10.1 to 1.5.1",
    });
}

/**
 * Logs that an agent's thread did not return from NIXL `afterMs` after `close`, and is given up
 * with all that NIXL holds.
 */
export function reportStuck({ log }: Pick<Ambient, "log">, agent: string, afterMs: number): void {
  log.error("nixl-agent-stuck", {
    agent,
    why: `its thread is in a call of NIXL and did not end ${afterMs} ms after close`,
    hint: "its memory stays allocated, and `released` of its transfers does not resolve; NIXL's log on stderr may say more",
  });
}
