import type { Ambient, Timer } from "@kv/interface";

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
