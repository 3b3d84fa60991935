import type { Agent, Notification } from "@kv/interface";

/** An agent's notifications, and those that a test puts between them. */
export class ForgedNotifications {
  readonly #forged: Notification[] = [];
  #wake: () => void = () => {};

  constructor(private readonly agent: Agent) {}

  add(...forged: readonly Notification[]): void {
    this.#forged.push(...forged);
    this.#wake();
  }

  async *all(): AsyncGenerator<Notification, void> {
    const real = this.agent.notifications();
    let next = real.next();
    for (;;) {
      const woken = new Promise<undefined>((resolve) => {
        this.#wake = () => resolve(undefined);
      });
      const arrived = this.#forged.length > 0 ? undefined : await Promise.race([next, woken]);
      yield* this.#forged.splice(0);
      if (arrived === undefined) continue;
      if (arrived.done === true) return;
      next = real.next();
      yield arrived.value;
    }
  }
}
