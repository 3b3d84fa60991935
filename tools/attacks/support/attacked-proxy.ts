import { setTimeout as sleep } from "node:timers/promises";
import type { AttackResult } from "./attack.js";
import { HonestClients } from "./honest-clients.js";
import { ObservedProcess } from "./observed-process.js";

const WARM_UP = 20;

/** What honest clients saw while an attack ran. */
export interface Observed {
  readonly right: number;
  readonly wrong: number;
  /** The longest time that one of them waited. It includes each stall of the proxy's event loop. */
  readonly longestMs: number;
  /** How much resident memory grew at most, in MiB. */
  readonly grownMib: number;
  readonly mostDescriptors: number;
}

/** kv-proxy in a process of its own, with instances that answer at once in another one. */
export class AttackedProxy {
  readonly url: string;
  readonly adminUrl: string;
  readonly #proxy: ObservedProcess;
  readonly #instances: ObservedProcess;
  readonly #prefill: number;

  private constructor(
    ready: string,
    proxy: ObservedProcess,
    instances: ObservedProcess,
    prefill: number,
  ) {
    [, this.url = "", this.adminUrl = ""] = /ready (\S+) .* admin (\S+)/.exec(ready) ?? [];
    this.#proxy = proxy;
    this.#instances = instances;
    this.#prefill = prefill;
  }

  static async start(): Promise<AttackedProxy> {
    const instances = new ObservedProcess("tools/attacks/support/slow-instance.ts", []);
    const { prefill, decode } = JSON.parse(await instances.line()) as {
      prefill: number;
      decode: number;
    };
    const proxy = new ObservedProcess("packages/proxy/src/cli.ts", [
      "--prefill",
      `127.0.0.1:${prefill}`,
      "--decode",
      `127.0.0.1:${decode}`,
      "--port",
      "0",
      "--admin-port",
      "0",
      "--log-level",
      "silent",
    ]);
    return new AttackedProxy(await proxy.line(), proxy, instances, prefill);
  }

  /** Requests of the attack that reached the prefill server: all but those of the honest client. */
  async reached({ right, wrong }: Observed): Promise<number> {
    return (await this.#counts()).requests - right - wrong - WARM_UP;
  }

  /** For how long the prefill server has had a slow request. */
  async slowMs(): Promise<number> {
    return (await this.#counts()).slowMs;
  }

  async #counts(): Promise<{ requests: number; slowMs: number }> {
    const response = await fetch(`http://127.0.0.1:${this.#prefill}/counts`);
    return (await response.json()) as { requests: number; slowMs: number };
  }

  /** Open descriptors. */
  descriptors(): number {
    return this.#proxy.descriptors();
  }

  /**
   * Runs an attack while a client in another process, at another address, sends a request every 20
   * ms.
   */
  async observe(attack: () => Promise<void>): Promise<Observed> {
    const client = await HonestClients.start({
      url: this.url,
      prompts: ["honest"],
      expected: [[1]],
      clients: 1,
      pauseMs: 20,
      warmUp: WARM_UP,
    });
    const grown = this.#proxy.watchMemory();
    let mostDescriptors = 0;
    const watching = setInterval(() => {
      mostDescriptors = Math.max(mostDescriptors, this.descriptors());
    }, 50);
    const measured = client.measure(attack);
    const { right, wrong, failed, longestMs } = await measured.finally(() => {
      clearInterval(watching);
      client.kill();
    });
    const notRight = Object.values(failed).reduce((sum, count) => sum + count, wrong);
    return { right, wrong: notRight, longestMs, grownMib: grown(), mostDescriptors };
  }

  close(): void {
    this.#proxy.kill();
    this.#instances.kill();
  }
}

/** Attacks a proxy of its own, beside honest requests. `judge` makes the row from what was seen. */
export async function attackProxy(
  attack: (proxy: AttackedProxy) => Promise<void>,
  judge: (seen: Observed, proxy: AttackedProxy) => AttackResult | Promise<AttackResult>,
): Promise<AttackResult> {
  const proxy = await AttackedProxy.start();
  try {
    return await judge(await proxy.observe(() => attack(proxy)), proxy);
  } finally {
    proxy.close();
  }
}

/** In words, for the table. */
export function observedText({
  right,
  wrong,
  longestMs,
  grownMib,
  mostDescriptors,
}: Observed): string {
  return `honest: ${right} right, ${wrong} not, longest ${longestMs} ms; +${grownMib} MiB, ${mostDescriptors} descriptors`;
}

/**
 * The text of a request for generated text; with `lengthBytes` its body may be longer than `body`.
 */
export function postText(body: string, lengthBytes = Buffer.byteLength(body)): string {
  return `POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: ${lengthBytes}\r\n\r\n${body}`;
}

/** Repeats a round of an attack until the signal aborts. */
export async function untilAborted(
  signal: AbortSignal,
  round: () => Promise<unknown>,
): Promise<void> {
  while (!signal.aborted) {
    await round().catch(() => {});
    await sleep(50, undefined, { signal }).catch(() => {});
  }
}
