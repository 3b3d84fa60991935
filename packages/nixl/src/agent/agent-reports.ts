import type { Ambient, Timer } from "@kv/interface";
import { REFUSED, UNREPAIRED } from "../addon/native.js";
import { REPAIRS } from "../addon/repairs.js";

const REPORT_INTERVAL_MS = 10_000;
const MAX_NAMED = 16;

/** Counts and logs dropped notifications: at once, then every 10 s at most. */
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

  /** Without `from` the notifications have several senders. */
  add(from: string | undefined, count = 1): void {
    const { clock, metrics } = this.#ambient;
    this.#total += count;
    metrics.count("kv_nixl_notifications_dropped", count);
    const isNamed =
      from !== undefined && (this.#bySender.has(from) || this.#bySender.size < MAX_NAMED);
    if (isNamed) this.#bySender.set(from, (this.#bySender.get(from) ?? 0) + count);
    else this.#others += count;
    // In a later turn, so that one warning has everything that was dropped at once.
    this.#timer ??= clock.setTimer(
      () => this.#report(),
      Math.max(0, this.#quietUntilMs - clock.now()),
    );
  }

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

/** Logs refused connections of peers, or the failed repair `from`. */
export function reportOfProcess(
  { log, metrics }: Pick<Ambient, "log" | "metrics">,
  kind: number,
  value: unknown,
  from: string | undefined,
): void {
  if (kind === REFUSED) {
    const count = value as number;
    metrics.count("kv_nixl_connections_refused", count);
    log.error("nixl-connections-refused", {
      count,
      why: "this process has no file descriptor left for a connection of a peer, which has to try again",
      hint: "raise the limit: ulimit -n, LimitNOFILE= of a systemd unit, --ulimit nofile= of a container",
    });
  } else if (kind === UNREPAIRED)
    log.warn("nixl-repair-failed", {
      repair: from,
      why: value,
      effect: REPAIRS[from ?? ""]?.without,
      hint: "use the NIXL of `kv-nixl install`, in 0.10.1 to 1.5.1; `kv-nixl doctor` lists the repairs",
    });
}

/**
 * Logs that an agent's thread did not return from NIXL `afterMs` after `close` and is given up with
 * all that NIXL holds.
 */
export function reportStuck({ log }: Pick<Ambient, "log">, agent: string, afterMs: number): void {
  log.error("nixl-agent-stuck", {
    agent,
    why: `its thread is in a call of NIXL and did not end ${afterMs} ms after close`,
    hint: "its memory stays allocated, and `released` of its transfers does not resolve; NIXL's log on stderr may say more",
  });
}
