import type { Clock, Log, LogFields } from "@kv/interface";

const WINDOW_MS = 10_000;

/**
 * Warnings that a peer can cause as often as it likes. Of each reason the first is logged at once;
 * those of the next ten seconds are counted, and logged as one with their number. Reasons are few
 * and are ours: text of a peer belongs into the fields.
 */
export class LimitedWarnings {
  readonly #clock: Clock;
  readonly #log: Log;
  /** By event and reason: what was suppressed since the last entry. */
  readonly #windows = new Map<string, { suppressed: number; fields: LogFields }>();

  constructor(clock: Clock, log: Log) {
    this.#clock = clock;
    this.#log = log;
  }

  warn(event: string, reason: string, fields: LogFields): void {
    const key = `${event} ${reason}`;
    const window = this.#windows.get(key);
    if (window !== undefined) {
      window.suppressed += 1;
      window.fields = fields;
      return;
    }
    this.#log.warn(event, { ...fields, suppressed: 0 });
    this.#open(event, key);
  }

  #open(event: string, key: string): void {
    const window = { suppressed: 0, fields: {} as LogFields };
    this.#windows.set(key, window);
    this.#clock.setTimer(() => {
      this.#windows.delete(key);
      if (window.suppressed === 0) return;
      // The fields of the last one; `suppressed` counts those that have no entry of their own.
      this.#log.warn(event, { ...window.fields, suppressed: window.suppressed });
      this.#open(event, key);
    }, WINDOW_MS);
  }
}
