import type { Log } from "@kv/interface";

/** What has been opened, to be closed in reverse, each once, and each even when another one fails. */
export interface Closers {
  add(what: string, close: () => Promise<void>): void;
  close(): Promise<void>;
}

export function closers(log: Log): Closers {
  const stack: { what: string; close: () => Promise<void> }[] = [];
  let closing: Promise<void> | undefined;

  async function closeAll(): Promise<void> {
    for (let entry = stack.pop(); entry !== undefined; entry = stack.pop()) {
      try {
        await entry.close();
      } catch (error) {
        log.error("close-failed", { what: entry.what, error: String(error) });
      }
    }
  }
  return {
    add: (what, close) => void stack.push({ what, close }),
    close() {
      closing ??= closeAll();
      return closing;
    },
  };
}
