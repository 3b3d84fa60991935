import type { Log } from "@kv/interface";

/** Closes in reverse order, each once, and each even when another one fails. */
export class CloseStack {
  readonly #log: Log;
  readonly #entries: { name: string; close: () => Promise<void> }[] = [];
  #closing: Promise<void> | undefined;

  constructor(log: Log) {
    this.#log = log;
  }

  get isClosing(): boolean {
    return this.#closing !== undefined;
  }

  add(name: string, close: () => Promise<void>): void {
    this.#entries.push({ name, close });
  }

  close(): Promise<void> {
    this.#closing ??= this.#closeAll();
    return this.#closing;
  }

  async #closeAll(): Promise<void> {
    for (let entry = this.#entries.pop(); entry !== undefined; entry = this.#entries.pop()) {
      try {
        await entry.close();
      } catch (error) {
        this.#log.error("close-failed", { what: entry.name, error: String(error) });
      }
    }
  }
}
